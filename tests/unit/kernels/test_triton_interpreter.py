"""The Triton kernels on a CPU, by Triton's interpreter: the tests of their operators."""

import subprocess
import sys
from collections.abc import Mapping

import pytest

from megalite.kernels.flash_attention import has_triton
from tests.unit.kernels.posing import ROOT

SHORT = {
    "flash_attention": "(everything and (sides or slice or rows)) or skips or sees_no_key",
    "recurrence": "documents and not mamba",
    "token_rows": "float32 and 37",
    "moments": "operator and 127",
}
LONG = {
    "dropout": "(equals and 127 and torch.float64) or (16_bit and torch.float16)",
    "dropout_add": "equals and not bfloat16 and (127 or 4097-0) or lie_apart",
    "softmax": "float64-op or whole_weights or large or not_a_number",
    "flash_attention": "test",
    "recurrence": "test",
    "token_rows": "not bfloat16",
    "moments": "operator",
}
"""Tests of each operator: not those in bf16, to which the interpreter truncates."""


def selection(names: Mapping[str, str]) -> tuple[str, ...]:
    """Return pytest's arguments that run the named tests of some operators in one process."""
    selected = " or ".join(f"(test_{name}.py and ({tests}))" for name, tests in names.items())
    return "-k", selected, *(f"tests/unit/kernels/test_{name}.py" for name in names)


@pytest.mark.skipif(not has_triton(), reason="Triton is not installed: pip install triton==3.7.1")
@pytest.mark.parametrize(
    "selected",
    [
        pytest.param(SHORT, id="short"),
        *(pytest.param({name: LONG[name]}, id=name, marks=pytest.mark.slow) for name in LONG),
    ],
)
def test_kernels_pass_the_operators_tests(selected: Mapping[str, str]) -> None:
    program = [sys.executable, "-m", "tests.unit.kernels.interpreted", "-rp", *selection(selected)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    for name in selected:
        assert f"PASSED tests/unit/kernels/test_{name}.py::" in done.stdout
