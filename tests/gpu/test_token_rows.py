"""Triton kernels of tokens' rows on a real GPU: at real sizes, the same bits as sums written out in fp32."""

from __future__ import annotations

import pytest
import torch

from megalite.kernels import copy_to_rows, sum_rows, token_rows
from megalite.kernels.flash_attention import has_triton
from tests.unit.kernels.test_token_rows import DROPS, DTYPES, rows_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not has_triton(), reason="Triton is not installed"),
]
SHAPES = [(1, 1, 1), (37, 5, 3), (513, 2880, 4), (4096, 2048, 8), (1023, 1025, 22), (0, 8, 2)]


@pytest.mark.parametrize("kept", DROPS.values(), ids=DROPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_sums_in_order(dtype: torch.dtype, shape: tuple[int, int, int], kept: float) -> None:
    num_tokens, width, topk = shape
    places, starts = (None if x is None else x.cuda() for x in rows_of(num_tokens, topk, kept))
    x = torch.randn(num_tokens, width, device="cuda").to(dtype).requires_grad_()
    rows = torch.randn(len(places), width, device="cuda").to(dtype).requires_grad_()
    copies = token_rows.copy_reference(x.detach(), places, starts, topk)
    counts = torch.full((num_tokens,), topk, device="cuda")
    if starts is not None:
        counts = starts.diff(append=starts.new_tensor([len(places)]))
    firsts = counts.cumsum(0) - counts
    sums = torch.zeros(num_tokens, width, device="cuda", dtype=torch.promote_types(dtype, torch.float32))
    for i in range(topk):
        has_row = counts > i
        sums[has_row] += rows.detach()[places[firsts[has_row] + i]]

    found, total = copy_to_rows(x, places, starts, topk), sum_rows(rows, places, starts, topk)
    (of_x,) = torch.autograd.grad(found, x, rows.detach())
    (of_rows,) = torch.autograd.grad(total, rows, x.detach())
    assert torch.equal(found, copies) and torch.equal(of_rows, copies)
    assert torch.equal(total, sums.to(dtype)) and torch.equal(of_x, sums.to(dtype))


def test_the_host_does_not_wait() -> None:
    places, starts = (x.cuda() for x in rows_of(64, 4, 0.6))
    x = torch.randn(64, 32, device="cuda", requires_grad=True)
    copy_to_rows(x, places, starts, 4)  # compiles the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        sum_rows(copy_to_rows(x, places, starts, 4), places, starts, 4).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
