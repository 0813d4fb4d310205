"""Another build of the compiled kernels, which poses as `megalite.kernels._C` while their tests run."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).parents[3]
TESTS = (
    "activations",
    "adamw",
    "cross_entropy",
    "dropout",
    "dropout_add",
    "activations_linear_gelu",
    "norm",
    "norm_of_sum",
    "philox_normal",
    "rotary",
    "softmax",
    "weight_gradient_and_bias",
)
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-sanitize=vptr")
FLAGS = (
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-DTORCH_TARGET_VERSION=0x020B000000000000",
    "-DPy_LIMITED_API=0x030A0000",
    f"-I{Path(torch.__file__).parent / 'include'}",
    f"-I{sysconfig.get_path('include')}",
)
RUN = """
import importlib.machinery, importlib.util, sys
import pytest, torch

name, path = "megalite.kernels._C", sys.argv[1]
loader = importlib.machinery.ExtensionFileLoader(name, path)
module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(name, path, loader=loader))
loader.exec_module(module)
sys.modules[name] = module
options = ["-q", "-x", "-s", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
sys.exit(pytest.main([*options, *sys.argv[2:]]))
"""


def build(library: Path, sources: Sequence[Path], flags: Sequence[str]) -> Path:
    """Compiles the sources, two at a time, and links them into `library`; `.cu` files count as C++."""

    def compiled(source: Path) -> str:
        target = library.parent / f"{source.name}.o"
        subprocess.run(["g++", *FLAGS, *flags, "-x", "c++", "-c", str(source), "-o", str(target)], check=True)
        return str(target)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, sources))
    torch_libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu"]
    link = ["g++", "-shared", "-Wl,-Bsymbolic", *flags, *objects, *torch_libraries, "-o", str(library)]
    subprocess.run(link, check=True)
    return library


def run_tests(library: Path, *options: str, **environment: str) -> None:
    """Runs the kernels' tests on a library and asserts that they pass."""
    files = [str(ROOT / "tests" / "unit" / "kernels" / f"test_{name}.py") for name in TESTS]
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(library), *files, *options],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout


def run_sanitized_tests(library: Path, *preloaded: Path) -> None:
    """As `run_tests`, for a library built with the flags in `SANITIZERS`."""
    # libstdc++ too: where Python itself does not load it, the sanitizer finds no function that throws.
    preload = [*(_path_of(name) for name in ("libasan.so", "libstdc++.so")), *map(str, preloaded)]
    run_tests(
        library,
        *("-k", "not opcheck"),
        LD_PRELOAD=" ".join(preload),
        ASAN_OPTIONS="detect_leaks=0:allocator_may_return_null=1:detect_stack_use_after_return=0",
        UBSAN_OPTIONS="print_stacktrace=1",
    )


def _path_of(name: str) -> str:
    done = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return done.stdout.strip()
