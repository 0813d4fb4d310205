"""The kernels on a real GPU: the tests of the CPU's, and what NVIDIA's compute-sanitizer finds in them."""

import shutil
import subprocess
import sys

import pytest
import torch

import megalite.kernels
from megalite.kernels import library
from tests.unit.kernels.posing import ROOT, TESTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_library = pytest.mark.skipif(bool(library.CUDA_LOAD_ERROR), reason=library.CUDA_LOAD_ERROR)


def run(*command: str, options: tuple[str, ...] = ()) -> None:
    files = [f"tests/unit/kernels/test_{name}.py" for name in TESTS]
    program = [*command, sys.executable, "-m", "tests.gpu.kernel_tests", *files, *options]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout


@needs_library
def test_every_operator_is_compiled() -> None:
    assert "eager" not in megalite.kernels.describe("cuda")


@needs_library
def test_kernels_pass_the_tests_of_the_cpu() -> None:
    run()


def test_kernels_compiled_at_run_time_pass_the_tests_of_the_cpu() -> None:
    """In one dtype, as each is compiled by itself; only the library's kernels check their arguments."""
    if problem := library.compile_problem("cuda"):
        pytest.skip(problem)
    chosen = "not (refused or any_numbers or torch.float64 or torch.float32 or torch.float16)"
    run(options=("--at-run-time", "-k", chosen))


@needs_library
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_no_kernel_touches_what_is_not_its_own(tool: str) -> None:
    # It multiplies a kernel's time: odd shapes, but no examples of hypothesis.
    run(
        "compute-sanitizer",
        f"--tool={tool}",
        "--error-exitcode=9",
        options=("-k", "exact or equals or formula"),
    )
