"""The Triton kernels of flash attention on a CPU, by Triton's interpreter: the tests of the operator."""

import subprocess
import sys

import pytest

from megalite.kernels.flash_attention import has_triton
from tests.unit.kernels.posing import ROOT


@pytest.mark.skipif(not has_triton(), reason="Triton is not installed: pip install triton==3.7.1")
def test_kernels_pass_the_operators_tests() -> None:
    program = [sys.executable, "-m", "tests.unit.kernels.interpreted"]
    done = subprocess.run(
        [*program, "tests/unit/kernels/test_flash_attention.py"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout
