"""Rows of tokens: both operators against sums written out, at odd shapes, with and without dropped rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalite.kernels import copy_to_rows, sum_rows

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1, 1), (3, 3, 2), (37, 5, 3), (5, 1027, 8), (0, 4, 2)]
"""tokens, features, experts of a token"""
DROPS = {"all kept": 1.0, "some dropped": 0.6, "all dropped": 0.0}


def rows_of(num_tokens: int, topk: int, kept: float) -> tuple[Tensor, Tensor | None]:
    """Return places in a random order, and the first row of each token if some are dropped."""
    generator = torch.Generator().manual_seed(num_tokens)
    counts = (torch.rand(num_tokens, topk, generator=generator) < kept).sum(1)
    places = torch.randperm(int(counts.sum()), generator=generator)
    return places, None if kept == 1 else counts.cumsum(0) - counts


def written_out(places: Tensor, starts: Tensor | None, num_tokens: int, topk: int) -> list[Tensor]:
    """Return the places of each token's rows."""
    if not num_tokens:
        return []
    if starts is None:
        return [*places.split(topk)]
    ends = [*starts[1:].tolist(), len(places)]
    return [places[first:end] for first, end in zip(starts.tolist(), ends, strict=True)]


def numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("kept", DROPS.values(), ids=DROPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_sums_written_out(dtype: torch.dtype, shape: tuple[int, int, int], kept: float) -> None:
    num_tokens, width, topk = shape
    places, starts = rows_of(num_tokens, topk, kept)
    of_tokens = written_out(places, starts, num_tokens, topk)
    x, rows = (numbers(n, width, dtype=dtype).requires_grad_() for n in (num_tokens, len(places)))

    copies = torch.zeros(len(places), width, dtype=dtype)
    sums = torch.zeros(num_tokens, width, dtype=torch.promote_types(dtype, torch.float32))
    for token, own in enumerate(of_tokens):
        for place in own.tolist():
            copies[place] = x[token].detach()
            sums[token] += rows[place].detach()

    found = copy_to_rows(x, places, starts, topk)
    assert torch.equal(found, copies)
    (of_x,) = torch.autograd.grad(found, x, rows.detach())
    total = sum_rows(rows, places, starts, topk)
    (of_rows,) = torch.autograd.grad(total, rows, x.detach())
    assert torch.equal(of_rows, copies)
    # On a CPU, PyTorch's sums round ties in bf16 up, and not to the even number.
    tolerance = {"rtol": 2**-7, "atol": 0} if dtype == torch.bfloat16 else {"rtol": 0, "atol": 0}
    for each in (total, of_x):
        torch.testing.assert_close(each, sums.to(dtype), **tolerance)


def test_gradients_that_are_not_contiguous_equal_those_of_copies() -> None:
    places, _ = rows_of(6, 2, 1.0)
    x = numbers(6, 4, dtype=torch.float32).requires_grad_()
    rows = copy_to_rows(numbers(4, 6, dtype=torch.float32).t(), places, None, 2)
    contiguous = numbers(4, 6, dtype=torch.float32).t().contiguous()
    assert torch.equal(rows, copy_to_rows(contiguous, places, None, 2))
    (grad,) = torch.autograd.grad(copy_to_rows(x, places, None, 2).sum(), x)  # of an expanded tensor
    assert torch.equal(grad, torch.full_like(x, 2))


@pytest.mark.parametrize("kept", DROPS.values(), ids=DROPS)
def test_operators_keep_torchs_rules(kept: float) -> None:
    places, starts = rows_of(5, 3, kept)
    x, rows = (numbers(n, 4, dtype=torch.float64).requires_grad_() for n in (5, len(places)))
    torch.library.opcheck(torch.ops.megalite.copy_to_rows.default, (x, places, starts, 3))
    torch.library.opcheck(torch.ops.megalite.sum_rows.default, (rows, places, starts, 3))
