#!/usr/bin/env bash
# Run the core tests with a Python and a torch, each time from a copy of the repository with an environment of its own.
#   scripts/check_versions.sh                     # with every supported pair of which the Python is here: hours
#   scripts/check_versions.sh python3.12 2.11.0   # with one pair
#   scripts/check_versions.sh python3.12 2.11.0 -k kernels   # further arguments go to pytest
# The core tests are those of the units and of forked ranks, a run of the program, and the levels of the packages.
# If the Python has that torch already, it is used. After a pass, add a new version to megalite/utils/torch_versions.py.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ $# = 0 ]; then
  results=()
  while read -r python version; do
    if ! command -v "$python" >/dev/null; then
      results+=("not run: $python, torch $version: there is no $python")
    elif "$0" "$python" "$version" </dev/null; then
      results+=("passed: $python, torch $version")
    else
      results+=("failed: $python, torch $version")
    fi
  done < <("${PYTHON:-python3}" - <<'END'
import runpy

for minor, torch in runpy.run_path("megalite/utils/torch_versions.py")["supported_pairs"]():
    print(f"python3.{minor} {torch}")
END
  )
  printf '%s\n' "" "${results[@]}"
  [[ "${results[*]}" == *passed:* && "${results[*]}" != *failed:* ]]
  exit
fi

python=$(command -v "$1")
version=$2
shift 2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git ls-files -z --cached --others --exclude-standard | tar --create --null --files-from - | tar --extract --directory "$work"
cd "$work"
export PYTHON=$python TORCH_VERSION=$version
scripts/install.sh --replace-torch test
scripts/test.sh -q tests/test_architecture.py tests/unit tests/ranks tests/fake_cuda tests/end_to_end/test_runs.py "$@"
.venv/bin/python - "$version" <<'END'
import sys, torch

assert torch.__version__.split("+")[0] == sys.argv[1], f"the tests ran with torch {torch.__version__}"
print(f"passed: Python {sys.version.split()[0]}, torch {torch.__version__}")
END
