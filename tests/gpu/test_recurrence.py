"""The Triton kernels of recurrences on a real GPU, in all dtypes and at lengths of many chunks."""

from __future__ import annotations

import pytest
import torch

from megalite.kernels import recurrence_problem
from megalite.kernels.flash_attention import has_triton
from tests.unit.kernels.test_recurrence import (
    CASES,
    ROUNDING,
    Case,
    assert_close,
    computed,
    expected,
    inputs,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not has_triton(), reason="Triton is not installed"),
]
LONG = {
    "qwen3-next": Case(515, d=128, e=128, r=2, documents=True),
    "large heads": Case(200, d=256, e=256, documents=True, has_state=True),
    "nemotron-h": Case(515, d=128, e=64, r=4, is_delta=False, documents=True),
}


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(
    "case", [*CASES.values(), *LONG.values()], ids=[*CASES, *(f"long {name}" for name in LONG)]
)
def test_equals_the_recurrence(case: Case, dtype: torch.dtype) -> None:
    assert recurrence_problem(torch.device("cuda"), dtype, case.d, case.e) == ""
    arguments = inputs(case, dtype, "cuda")
    results = computed(case, arguments)
    assert_close(case, results, expected(case, arguments), dtype)
    again = computed(case, arguments)
    assert all(torch.equal(x, y) for x, y in zip(results, again, strict=True))  # no sum is atomic
