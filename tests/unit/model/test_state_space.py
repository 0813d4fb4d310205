"""The state-space model in chunks is the recurrence, token by token."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

from megalite.kernels.visible_keys import document_starts
from megalite.model.state_space import scan

B, G, R, P, N = 2, 2, 3, 4, 5
EXACT = {"rtol": 1e-12, "atol": 1e-12}


class Inputs(NamedTuple):
    x: Tensor
    dt: Tensor
    a: Tensor
    of_input: Tensor
    of_output: Tensor


def drawn(num_tokens: int, dtype: torch.dtype = torch.float64) -> Inputs:
    generator = torch.Generator().manual_seed(num_tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    x, of_input, of_output = normal(num_tokens, B, G, R, P), *(normal(num_tokens, B, G, N) for _ in range(2))
    return Inputs(x, normal(num_tokens, B, G, R).exp(), -normal(G, R).exp(), of_input, of_output)


def token_by_token(inputs: Inputs, starts: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute the recurrence; a state before the first token belongs to documents that start before it."""
    x, dt, a, of_input, of_output = inputs
    state = x.new_zeros(B, G, R, P, N) if state is None else state
    outputs = []
    for t in range(x.shape[0]):
        goes_on = (starts[:, t] < t).view(B, 1, 1, 1, 1)
        decay = (dt[t] * a).exp()[..., None, None]
        added = torch.einsum("bgr,bgrp,bgn->bgrpn", dt[t], x[t], of_input[t])
        state = (state * goes_on) * decay + added
        outputs.append(torch.einsum("bgrpn,bgn->bgrp", state, of_output[t]))
    return torch.stack(outputs), state


def in_documents(num_tokens: int) -> Tensor:
    """Starts of documents: at the edges of chunks of 4, within them, of one token, over several chunks."""
    borders = torch.tensor([[1, 4, 5, 9, 10], [3, 8, 12, 15, 16]])
    ids = (torch.arange(num_tokens) >= borders.unsqueeze(-1)).sum(1)
    return document_starts(ids)


@pytest.mark.parametrize("has_documents", [True, False], ids=["documents", "whole"])
@pytest.mark.parametrize("chunk_size", [4, 64])
@pytest.mark.parametrize("num_tokens", [1, 4, 7, 23, 31])
def test_is_the_recurrence(num_tokens: int, chunk_size: int, has_documents: bool) -> None:
    starts = in_documents(num_tokens) if has_documents else None
    zeros = torch.full((B, num_tokens), -1) if starts is None else starts
    ours, theirs = (Inputs(*(each.requires_grad_() for each in drawn(num_tokens))) for _ in range(2))
    found, state = scan(*ours, starts, chunk_size=chunk_size)
    wanted, last = token_by_token(theirs, zeros)
    torch.testing.assert_close(found, wanted, **EXACT)
    torch.testing.assert_close(state, last, **EXACT)
    gradients = torch.autograd.grad(found.square().sum() + state.sum(), ours)
    expected = torch.autograd.grad(wanted.square().sum() + last.sum(), theirs)
    for gradient, each in zip(gradients, expected, strict=True):  # exponents are differences of sums
        torch.testing.assert_close(gradient, each, rtol=0, atol=1e-12 * each.abs().max().item())


@pytest.mark.parametrize("has_documents", [True, False], ids=["documents", "whole"])
@pytest.mark.parametrize("cut", [1, 6, 8, 20])
def test_goes_on_from_a_state(cut: int, has_documents: bool) -> None:
    inputs, starts = drawn(21), in_documents(21) if has_documents else None
    x, dt, a, of_input, of_output = inputs
    of_parts = [each.split((cut, 21 - cut)) for each in (x, dt, of_input, of_output)]
    outputs, state = [], None
    for part, first in enumerate((0, cut)):
        x, dt, of_input, of_output = (each[part] for each in of_parts)
        own = None if starts is None else starts[:, first : first + x.shape[0]] - first
        y, state = scan(x, dt, a, of_input, of_output, own, state, chunk_size=4)
        outputs.append(y)
    expected, last = scan(*inputs, starts, chunk_size=4)
    torch.testing.assert_close(torch.cat(outputs), expected, **EXACT)
    torch.testing.assert_close(state, last, **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_transformers_scan(dtype: torch.dtype) -> None:
    inputs = drawn(37, dtype)
    found, _ = scan(*inputs, chunk_size=8)
    x, dt, a, of_input, of_output = inputs
    expected = mamba2_chunk_scan(
        *(each.transpose(0, 1).flatten(2, 3) for each in (x, dt)),
        a.flatten(),
        *(each.transpose(0, 1) for each in (of_input, of_output)),
        chunk_size=8,
    )
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.flatten(2, 3).transpose(0, 1), expected.float(), rtol=1e-5, atol=1e-4)


def test_strong_decay_gives_no_infinity() -> None:
    """Where a chunk decays by more than the smallest number, gradients are finite."""
    inputs = Inputs(*(each.requires_grad_() for each in drawn(24, torch.float32)))
    strong = inputs._replace(a=inputs.a * 1e3)
    y, state = scan(*strong, in_documents(24), chunk_size=8)
    gradients = torch.autograd.grad(y.square().sum() + state.sum(), inputs)
    assert all(torch.isfinite(each).all() for each in (y, state, *gradients))
