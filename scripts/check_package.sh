#!/usr/bin/env bash
# Build the sdist and the wheel, install each into an environment of its own, and train ten iterations there.
# It needs .venv of scripts/install.sh test, and installs the same version of torch. It takes about three minutes.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$PWD/.venv/bin/python
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
say() { printf '\n== %s\n' "$*"; }

say "Building the sdist and, from the same sources, a wheel"
mkdir "$work/tree"
git ls-files -z --cached --others --exclude-standard -- csrc megalite scripts setup.py pyproject.toml MANIFEST.in \
  README.md CHANGELOG.md LICENSE | tar --create --null --files-from - | tar --extract --directory "$work/tree"
(cd "$work/tree" && "$python" -c 'import setuptools.build_meta as build; build.build_sdist("../sdist")' >"$work/log" 2>&1) || {
  cat "$work/log"
  exit 1
}
"$python" -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir "$work/wheel" "$work/tree"
compgen -G "$work/tree/megalite/data/_index_builder.*.so" >/dev/null || {
  echo "error: the build left no libraries in the folder that it was built from" >&2
  exit 1
}
sdist=$(echo "$work"/sdist/megalite-*.tar.gz) wheel=$(echo "$work"/wheel/megalite-*.whl)

say "Building a wheel from the sdist where there is no torch: without the kernels"
"$python" -m venv "$work/sdist.venv"
"$work/sdist.venv/bin/python" -m pip wheel --quiet --no-deps --wheel-dir "$work/without_torch" "$sdist"

say "Installing the sdist, with its own build environment, where torch is installed already"
"$work/sdist.venv/bin/python" -m pip install --quiet --no-compile "torch==$("$python" -c 'import torch; print(torch.__version__.split("+")[0])')"
cp -r "$work/sdist.venv" "$work/wheel.venv" # its python finds its packages beside itself
"$work/sdist.venv/bin/python" -m pip install --quiet --no-compile "$sdist"

say "Installing the wheel"
"$work/wheel.venv/bin/python" -m pip install --quiet --no-compile "$wheel"

say "Comparing the files of the packages"
"$python" - "$wheel" "$work"/without_torch/*.whl "$work"/sdist.venv/lib/python*/site-packages <<'END'
import sys
from pathlib import Path
from zipfile import ZipFile

def package(names):
    return {name for name in names if name.startswith("megalite/")}

wheel, without_torch = (package(ZipFile(path).namelist()) for path in sys.argv[1:3])
site = Path(sys.argv[3])
from_sdist = package(str(path.relative_to(site)) for path in (site / "megalite").rglob("*") if path.is_file())
kernels = {name for name in wheel if name.startswith("megalite/kernels/_C") and name.endswith(".so")}
needed = {"megalite/py.typed", "megalite/data/_index_builder.pyi", "megalite/plan/job.sbatch", "megalite/plan/job.yaml", "megalite/plan/errors.json"}
assert needed <= wheel and kernels, sorted(wheel)
assert wheel == from_sdist, sorted(wheel ^ from_sdist)
assert without_torch == wheel - kernels, sorted(without_torch ^ wheel)
print(f"{len(wheel)} files each, with {', '.join(sorted(kernels))}")
END

cat >"$work/consumer.py" <<'END'
from megalite.config import ModelConfig

layers: int = ModelConfig().num_layers
wrong: str = ModelConfig().num_layers
END
cd "$work" # away from the repository, so that the installed package is imported
for kind in sdist wheel; do
  say "Training ten iterations with the package of the $kind"
  bin=$work/$kind.venv/bin
  "$bin/megalite" --version
  flags=(--preset gpt-tiny --mock-data --vocab-size 256 --seq-length 32 --global-batch-size 4 --train-iters 10 --lr 1e-3 --log-interval 1)
  if [ $kind = sdist ]; then
    OMP_NUM_THREADS=1 "$bin/python" -m torch.distributed.run --nproc-per-node 2 -m megalite train "${flags[@]}" --tp 2 >"$kind.log" 2>&1
  else
    OMP_NUM_THREADS=1 "$bin/megalite" train "${flags[@]}" >"$kind.log" 2>&1
  fi || {
    cat "$kind.log"
    exit 1
  }
  grep "kernels on cpu: .*: compiled" "$kind.log"
  grep "iteration  *10/" "$kind.log"
done

say "Checking that a type checker reads the package's types"
"$python" -m mypy --strict --python-executable "$work/wheel.venv/bin/python" consumer.py >mypy.log || true
cat mypy.log
grep -q '^consumer.py:4: .*"int".*"str"' mypy.log
grep -q "^Found 1 error" mypy.log
