"""The Triton kernels of flash attention on a real GPU, in all dtypes and at lengths of many blocks."""

from __future__ import annotations

import pytest
import torch

from megalite.kernels.flash_attention import has_triton
from tests.unit.kernels.test_flash_attention import (
    CASES,
    DTYPES,
    SLICED,
    Case,
    assert_close,
    computed,
    computed_by_slices,
    expected,
    inputs,
    zeros_of_weights,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not has_triton(), reason="Triton is not installed"),
]
LONG = {
    "causal": Case(515),
    "one key more": Case(257, d=128),
    "gqa": Case(384, d=128, n=8, g=2),
    "documents": Case(700, documents=True),
    "dropout": Case(333, p=0.1),
    "dropout, rows of four": Case(512, d=128, p=0.1),
    "everything": Case(509, d=96, n=4, alibi=True, documents=True, p=0.2),
    "a slice": Case(700, d=128, n=4, g=2, queries=slice(350, 700)),
    "large heads": Case(260, d=256, n=4, alibi=True, documents=True, p=0.2),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "case", [*CASES.values(), *LONG.values()], ids=[*CASES, *(f"long {name}" for name in LONG)]
)
def test_equals_the_formula(case: Case, dtype: torch.dtype) -> None:
    parts = inputs(case, dtype, "cuda")
    results = computed(case, parts)
    assert_close(results, expected(case, parts), dtype)
    again = computed(case, parts)
    assert all(torch.equal(x, y) for x, y in zip(results, again, strict=True))  # no sum is atomic


@pytest.mark.parametrize(
    "case", [*SLICED.values(), Case(700, d=128, n=4, g=2, documents=True, p=0.1)], ids=[*SLICED, "long"]
)
def test_slices_of_keys_merge_to_the_formula(case: Case) -> None:
    parts = inputs(case, torch.float32, "cuda")
    assert_close(computed_by_slices(case, parts), expected(case, parts), torch.float32)


@pytest.mark.parametrize("s", [201, 256])
def test_drops_exactly_the_weights_that_blockwise_attention_drops(s: int) -> None:
    case = Case(s, d=256, p=0.4)
    on_gpu, blockwise = zeros_of_weights(case, "cuda")
    assert torch.equal(on_gpu, blockwise)
    assert torch.equal(on_gpu.cpu(), zeros_of_weights(case)[0])
