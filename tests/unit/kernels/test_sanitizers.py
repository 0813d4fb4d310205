"""The kernels' tests, run on a build with AddressSanitizer and UndefinedBehaviorSanitizer."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
TESTS = ("activations", "cross_entropy", "dropout", "dropout_add", "normal", "rotary", "softmax")
RUN = """
import importlib.machinery, importlib.util, sys
import pytest, torch

name, path = "megalite.kernels._C", sys.argv[1]
loader = importlib.machinery.ExtensionFileLoader(name, path)
module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(name, path, loader=loader))
loader.exec_module(module)
sys.modules[name] = module
options = ["-q", "-x", "-s", "-p", "no:cacheprovider", "-m", "not slow", "-k", "not opcheck"]
sys.exit(pytest.main([*options, *sys.argv[2:]]))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("compiled")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_no_kernel_touches_what_is_not_its_own(tmp_path: Path) -> None:
    library, include = tmp_path / "_C.so", Path(torch.__file__).parent / "include"
    sources = [ROOT / "csrc" / "library.cpp", *sorted((ROOT / "csrc" / "cpu").glob("*.cpp"))]
    flags = ["-std=c++17", "-O1", "-g", "-fPIC", "-shared", "-ffp-contract=off", "-fopenmp-simd"]
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-sanitize=vptr"]
    defines = ["-DTORCH_TARGET_VERSION=0x020B000000000000", "-DPy_LIMITED_API=0x030A0000"]
    paths = [
        f"-I{include}",
        f"-I{sysconfig.get_path('include')}",
        f"-L{include.parent / 'lib'}",
        "-ltorch_cpu",
    ]
    subprocess.run(
        ["g++", *flags, *sanitizers, *defines, *map(str, sources), *paths, "-o", str(library)], check=True
    )
    # libstdc++ too: where Python itself does not load it, the sanitizer finds no function that throws.
    preload = [_path_of(name) for name in ("libasan.so", "libstdc++.so")]
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(preload),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    files = [str(ROOT / "tests" / "unit" / "kernels" / f"test_{name}.py") for name in TESTS]
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(library), *files],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "passed" in done.stdout


def _path_of(name: str) -> str:
    done = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return done.stdout.strip()
