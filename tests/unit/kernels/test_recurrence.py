"""The recurrence against itself token by token in fp64: its reference on a CPU, its kernels where they run.

`test_triton_interpreter.py` runs this file on Triton's interpreter, `tests/gpu/test_recurrence.py` its cases
on a GPU.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels.recurrence import recurrence, reference

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Triton's interpreter multiplies bf16 numbers wrongly.
DTYPES = [torch.float32] if IS_INTERPRETED else [torch.float32, torch.bfloat16]
ROUNDING = {torch.float32: 1e-5, torch.float16: 2.0**-8, torch.bfloat16: 2.0**-5}
"""of the largest element, or of 1"""
NAMES = ("output", "last state", "q", "k", "v", "decay", "rate", "state")


class Case(NamedTuple):
    s: int
    d: int = 16
    e: int = 16
    g: int = 1
    r: int = 1
    is_delta: bool = True
    documents: bool = False
    has_state: bool = False
    decay: float = 0.3


CASES = {
    "one token": Case(1),
    "whole chunks": Case(32, d=32, e=64),
    "padded heads": Case(37, d=40, e=24, g=2),
    "shared keys": Case(21, g=2, r=3),
    "documents": Case(37, documents=True),
    "state": Case(21, has_state=True),
    "everything": Case(53, d=24, e=40, g=2, r=2, has_state=True, documents=True),
    "strong decay": Case(40, decay=300.0, documents=True),
    "no decay": Case(20, decay=0.0),
    "large keys": Case(17, d=200, documents=True),
    "large values": Case(17, e=200, documents=True),
}
CASES |= {f"mamba, {name}": case._replace(is_delta=False) for name, case in CASES.items()}


def inputs(case: Case, dtype: torch.dtype, device: str = "cpu") -> list[Tensor | None]:
    """The arguments of the operator up to the state, in the memory order of hidden states."""
    generator = torch.Generator().manual_seed(case.s)
    s, d, e, g, r = case[:5]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k = (F.normalize(normal(s, 2, g, d), dim=-1).permute(1, 2, 0, 3) for _ in range(2))
    v = normal(s, 2, g, r, e).permute(1, 2, 3, 0, 4)
    decay = (-case.decay * normal(s, 2, g, r).exp()).permute(1, 2, 3, 0)
    rate = normal(s, 2, g, r).sigmoid().permute(1, 2, 3, 0)
    state = normal(2, g, r, d, e) if case.has_state else None
    wide = torch.promote_types(dtype, torch.float32)
    tensors = [x.to(device, dtype) for x in (q, k, v)] + [x.to(device, wide) for x in (decay, rate)]
    starts = document_starts(case).to(device) if case.documents else None
    return [*tensors, starts, None if state is None else state.to(device, wide)]


def document_starts(case: Case) -> Tensor:
    """Documents of 1, 2, … tokens in the first sample; a few in the second, at edges of chunks too."""
    lengths = [1 + i for i in range(case.s)]
    first = torch.tensor([i for i, length in enumerate(lengths) for _ in range(length)])[: case.s]
    second = (torch.arange(case.s)[:, None] >= torch.tensor([16, 32, 35])).sum(-1)
    starts = []
    for ids in (first, second):
        is_first = ids.diff(prepend=ids[:1] - 1) != 0
        starts.append(torch.arange(case.s).where(is_first, 0).cummax(0).values)
    found = torch.stack(starts)
    return found.where(found > 0, -3) if case.has_state else found


def computed(case: Case, arguments: list[Tensor | None]) -> list[Tensor]:
    """The outputs, the last state, and the gradients of all tensors of floating-point numbers."""
    q, k, v, decay, rate, starts, state = (
        x if x is None or x.dtype == torch.int64 else x.detach().requires_grad_() for x in arguments
    )
    results = recurrence(q, k, v, decay, rate, starts, state, is_delta=case.is_delta)
    return with_gradients(results, [q, k, v, decay, rate, state])


def expected(case: Case, arguments: list[Tensor | None]) -> list[Tensor]:
    """The same by autograd of the recurrence token by token, in fp64 on the CPU."""
    q, k, v, decay, rate, starts, state = (
        x if x is None else x.cpu() if x.dtype == torch.int64 else x.detach().cpu().double().requires_grad_()
        for x in arguments
    )
    results = reference(q, k, v, decay, rate, starts, state, case.is_delta)
    return with_gradients(results, [q, k, v, decay, rate, state])


def with_gradients(results: tuple[Tensor, Tensor], leaves: list[Tensor | None]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in results]
    return [*results, *torch.autograd.grad(results, [x for x in leaves if x is not None], grads)]


def assert_close(case: Case, results: list[Tensor], references: list[Tensor], dtype: torch.dtype) -> None:
    allowed = ROUNDING[dtype] + 1e-5 * case.decay  # exponents are differences of sums
    assert [x.dtype for x in results[2:5]] == [dtype] * 3
    for name, result, wanted in zip(NAMES, results, references, strict=False):
        error = (result.detach().cpu().double() - wanted).abs().max() / wanted.abs().max().clamp_min(1.0)
        assert error < allowed, (name, error)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_the_recurrence(case: Case, dtype: torch.dtype) -> None:
    arguments = inputs(case, dtype)
    assert_close(case, computed(case, arguments), expected(case, arguments), dtype)


def test_empty_samples_have_no_outputs() -> None:
    case = Case(0)
    state = torch.randn(2, 1, 1, 16, 16, requires_grad=True)
    out, last = recurrence(*inputs(case, torch.float32)[:6], state, is_delta=True)
    assert out.shape == (2, 1, 1, 0, 16)
    torch.testing.assert_close(last, state)
    torch.testing.assert_close(torch.autograd.grad(last.sum(), state)[0], torch.ones_like(state))


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter is no part of a graph")
@pytest.mark.parametrize("name", ["state", "mamba, one token"])
def test_opcheck(name: str) -> None:
    case = CASES[name]
    *tensors, starts, state = inputs(case, torch.float32)
    leaves = [x.detach().requires_grad_() for x in tensors]
    rest = starts, state, case.is_delta
    torch.library.opcheck(torch.ops.megalite.recurrence.default, (*leaves, *rest))
    out, last = recurrence(*tensors, starts, state, is_delta=case.is_delta)
    backward = torch.ops.megalite.recurrence_backward.default
    torch.library.opcheck(backward, (out, last, *tensors, *rest))
