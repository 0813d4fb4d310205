"""Flash attention against the formula in fp64: its reference on a CPU, its Triton kernels where they run.

`test_triton_interpreter.py` runs this file on Triton's interpreter, `tests/gpu/test_flash_attention.py` its
cases on a GPU.
"""

from __future__ import annotations

import itertools
import math
import os
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from megalite.attention.plain import Blocking, attend
from megalite.kernels import CausalSoftmax, Drop, VisibleKeys, dropout, flash_attention, site_key
from megalite.kernels.flash_attention import (
    BLACKWELL_SIZES,
    SMALL_SIZES,
    different_sizes,
    operands,
    padded,
)
from megalite.kernels.packed_heads import gradients_of
from tests.unit.kernels.test_softmax import expected_weights

KEY = site_key(1, "attention.weights")
NUMBERS = torch.tensor([2**40 + 5, 3])
"""of two samples in the run"""
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Triton's interpreter multiplies bf16 numbers wrongly, and fp16 is not rounded as on a GPU.
DTYPES = [torch.float32] if IS_INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
ROUNDING = {torch.float32: 5e-6, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
"""of the largest element, or of 1"""


class Case(NamedTuple):
    s: int
    d: int = 64
    n: int = 2
    g: int = 2
    alibi: bool = False
    documents: bool = False
    both_sides: bool = False
    window: int | None = None
    p: float = 0.0
    cap: float | None = None
    has_sinks: bool = False
    queries: slice = slice(None)
    """of the sequence"""


CASES = {
    "one query": Case(1),
    "causal": Case(37),
    "whole blocks": Case(64),
    "small heads": Case(21, d=8),
    "padded heads": Case(20, d=80),
    "large heads": Case(18, d=256, p=0.2),
    "large heads, gqa": Case(34, d=256, n=4, p=0.2),
    "large heads, one group": Case(34, d=192, n=3, g=1, alibi=True, documents=True),
    "gqa": Case(35, n=4),
    "one group": Case(33, n=3, g=1, alibi=True),
    "alibi": Case(37, alibi=True),
    "documents": Case(50, documents=True),
    "both sides": Case(50, documents=True, both_sides=True),
    "both sides, everything": Case(45, d=40, n=4, alibi=True, documents=True, both_sides=True, p=0.3),
    "window": Case(50, window=7),
    "window of no other key": Case(21, n=4, window=0),
    "window, gqa, everything": Case(45, d=40, n=4, alibi=True, documents=True, window=11, p=0.3),
    "capped": Case(37, cap=0.8),
    "capped, everything": Case(45, d=40, n=4, alibi=True, documents=True, window=11, p=0.3, cap=1.5),
    "one query, dropout": Case(1, p=0.5),
    "dropout": Case(37, p=0.3),
    "dropout, rows of four": Case(40, p=0.3),
    "sinks": Case(37, n=4, has_sinks=True),
    "a slice of the queries": Case(37, queries=slice(11, 30)),
    "the last queries": Case(70, n=4, queries=slice(35, 70)),
    "a slice over blocks": Case(210, d=16, n=1, g=1, queries=slice(70, 200)),
    "a slice, both sides": Case(50, documents=True, both_sides=True, p=0.3, queries=slice(13, 40)),
    "a slice, everything": Case(
        45, d=40, g=1, alibi=True, documents=True, window=11, p=0.3, cap=1.5, queries=slice(9, 36)
    ),
    "everything": Case(45, d=40, n=4, alibi=True, documents=True, p=0.3),
    "everything, rows of four": Case(44, d=40, g=1, alibi=True, documents=True, p=0.3, has_sinks=True),
}


def softmax_of(case: Case, device: str = "cpu") -> CausalSoftmax:
    softmax = CausalSoftmax(case.s, 1.0 / math.sqrt(case.d), cap=case.cap)
    if case.alibi:
        generator = torch.Generator().manual_seed(1)
        slopes = torch.rand(case.n, generator=generator, dtype=torch.float64)
        softmax = softmax._replace(slopes=slopes.to(device))
    if case.documents:
        ends = torch.tensor([[0.1, 0.13, 0.6, 0.9], [0.5, 0.55, 0.57, 2.0]]) * case.s
        ids = (torch.arange(case.s)[:, None] >= ends[:, None]).sum(-1)
        softmax = softmax._replace(
            visible=VisibleKeys.in_documents(ids.to(device), is_causal=not case.both_sides)
        )
    if case.window is not None:
        visible = softmax.visible.within(case.window, case.s, torch.device(device))
        softmax = softmax._replace(visible=visible if case.documents else visible.expand(2))
    if case.queries.start:
        softmax = softmax._replace(visible=softmax.visible._replace(first=case.queries.start))
    if case.p:
        drop = Drop(case.p, KEY, NUMBERS.to(device), base=8 * case.s**2)
        softmax = softmax._replace(drop=drop)
    return softmax


def inputs(case: Case, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """Queries, keys and values in the order of hidden states, a gradient, and sinks if the case has them."""
    generator = torch.Generator().manual_seed(0)
    sinks = [torch.linspace(-2.0, 2.0, case.n).to(device, dtype)] if case.has_sinks else []
    parts = [
        torch.randn(case.s, 2, heads, case.d, generator=generator, dtype=torch.float64)
        .to(device, dtype)
        .permute(1, 2, 0, 3)
        for heads in (case.n, case.g, case.g, case.n)
    ]
    parts[0], parts[3] = (part[:, :, case.queries] for part in (parts[0], parts[3]))
    return parts + sinks


def computed(case: Case, parts: list[Tensor]) -> list[Tensor]:
    """The output, and the gradients of queries, keys, values and sinks."""
    q, k, v, grad, *sinks = (part.detach().requires_grad_() for part in parts)
    leaves = q, k, v, *sinks
    softmax = softmax_of(case, str(grad.device))._replace(parameters=tuple(sinks))
    out = flash_attention(q, k, v, softmax)
    return [out, *torch.autograd.grad(out, leaves, grad.detach())]


def expected(case: Case, parts: list[Tensor]) -> list[Tensor]:
    """The same by autograd of the formula, in fp64 on the CPU."""
    q, k, v, grad, *sinks = (part.cpu().double().requires_grad_() for part in parts)
    leaves = q, k, v, *sinks
    k, v = (x.repeat_interleave(case.n // case.g, dim=1) for x in (k, v))
    out = expected_weights(q @ k.mT, softmax_of(case), case.queries.start or 0, 0, *sinks) @ v
    return [out, *torch.autograd.grad(out, leaves, grad.detach())]


SLICED = {
    "causal": Case(50),
    "whole blocks": Case(128, n=4),
    "capped": Case(70, cap=0.8, alibi=True, n=4),
    "window": Case(70, window=7),
    "documents": Case(70, documents=True),
    "documents in small heads": Case(61, d=8, n=3, g=1, documents=True),
    "both sides": Case(70, n=4, alibi=True, documents=True, both_sides=True, p=0.3),
    "dropout, rows of four": Case(96, p=0.3),
    "some queries": Case(70, documents=True, queries=slice(11, 50)),
    "some queries, all": Case(
        70, d=40, n=4, alibi=True, documents=True, window=11, p=0.3, cap=1.5, queries=slice(9, 52)
    ),
}
"""Cases in which a call has a slice of the keys."""


def computed_by_slices(case: Case, parts: list[Tensor]) -> list[Tensor]:
    """The output and gradients of `computed`, merged from three slices of the keys."""
    q, k, v, grad = parts
    softmax, first = softmax_of(case, str(grad.device)), case.queries.start or 0
    bounds = [0, case.s // 4, case.s // 2 + 3, case.s]
    slices = [slice(*pair) for pair in itertools.pairwise(bounds)]
    keys = [(k[:, :, each], v[:, :, each]) for each in slices]
    calls = [
        (q, *pair, operands(softmax, first, each.start)) for pair, each in zip(keys, slices, strict=True)
    ]
    found = [torch.ops.megalite.flash_attention(*heads, *rest) for *heads, rest in calls]
    for out, log_sums in found:
        assert not out[log_sums.isneginf()].any()
    log_sums = torch.stack([each for _, each in found]).logsumexp(0)
    out = sum(out.double() * (each - log_sums).exp()[..., None] for out, each in found).to(q.dtype)  # type: ignore[union-attr]
    backward = torch.ops.megalite.flash_attention_backward
    grads = [gradients_of(backward(grad, *heads, out, log_sums, *rest)) for *heads, rest in calls]
    of_q, of_k, of_v = zip(*grads, strict=True)
    return [out, sum(x.double() for x in of_q).to(q.dtype), torch.cat(of_k, dim=2), torch.cat(of_v, dim=2)]  # type: ignore[union-attr]


def assert_close(results: list[Tensor], references: list[Tensor], dtype: torch.dtype) -> None:
    names = ("output", "q", "k", "v", "sinks")[: len(references)]
    for name, result, reference in zip(names, results, references, strict=True):
        assert result.dtype == dtype
        error = (result.cpu().double() - reference).abs().max() / reference.abs().max().clamp_min(1.0)
        # A sink's gradient is a sum over all queries of rounded numbers.
        assert error < ROUNDING[dtype] * (4 if name == "sinks" else 1), (name, error)


def zeros_of_weights(case: Case, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Where the weights are 0, ``[b, n, s, s]``: in this operator, and in blockwise attention.

    The values are rows of the identity, so that the output is the weights.
    """
    q, k, _, _ = inputs(case, torch.float32, device)
    v = torch.eye(case.s, case.d, device=device).expand_as(k)
    softmax = softmax_of(case, device)
    zeros = flash_attention(q, k, v, softmax) == 0.0
    blockwise, _ = attend(q, k, v, softmax, Blocking(16, 1 << 20))
    return zeros[..., : case.s], (blockwise == 0.0)[..., : case.s]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_the_formula(case: Case, dtype: torch.dtype) -> None:
    parts = inputs(case, dtype)
    assert_close(computed(case, parts), expected(case, parts), dtype)


@pytest.mark.parametrize("case", SLICED.values(), ids=SLICED)
def test_slices_of_keys_merge_to_the_formula(case: Case) -> None:
    parts = inputs(case, torch.float32)
    assert_close(computed_by_slices(case, parts), expected(case, parts), torch.float32)


def test_a_query_that_sees_no_key_of_a_slice_adds_nothing() -> None:
    case = Case(50, queries=slice(10, 20))
    q, k, v, grad = inputs(case, torch.float32)
    heads, rest = (q, k[:, :, 15:], v[:, :, 15:]), operands(softmax_of(case), 10, 15)
    out, log_sums = torch.ops.megalite.flash_attention(*heads, *rest)
    assert torch.equal(log_sums.isneginf(), (torch.arange(10, 20) < 15).expand_as(log_sums))
    assert not out[:, :, :5].any()
    of_q, of_k, of_v = gradients_of(
        torch.ops.megalite.flash_attention_backward(grad, *heads, out, log_sums.clamp_min(-9.0), *rest)
    )
    assert not of_q[:, :, :5].any()
    assert not any(x[:, :, 5:].any() for x in (of_k, of_v))


@pytest.mark.parametrize("s", [37, 40])
def test_drops_exactly_the_weights_that_blockwise_attention_drops(s: int) -> None:
    case = Case(s, p=0.4)
    zeros, blockwise = zeros_of_weights(case)
    assert torch.equal(zeros, blockwise)
    kept = dropout(torch.ones(1, 2, case.n, s, s), case.p, KEY, NUMBERS, base=8 * s**2)[0]
    assert torch.equal(~zeros, (kept != 0.0).tril())


@pytest.mark.skipif(not IS_INTERPRETED, reason="only the Triton kernels have blocks of keys")
def test_skips_blocks_outside_of_a_window() -> None:
    """A NaN in a block that is read would spread: values meet a weight of 0, and 0 x NaN is NaN."""
    case = Case(104, d=16, n=1, g=1, window=5)
    *leaves, grad = (part.detach().requires_grad_() for part in inputs(case, torch.float32))
    q, k, v = leaves
    broken = v.detach().clone()
    broken[:, :, :32] = torch.nan
    out = flash_attention(q, k, broken, softmax_of(case))
    assert out[:, :, 69:].isfinite().all()
    assert out[:, :, 31].isnan().all()
    later = grad.detach().clone()
    later[:, :, 69:] = torch.nan
    of_q, of_k, of_v = torch.autograd.grad(flash_attention(q, k, v, softmax_of(case)), leaves, later)
    assert all(x[:, :, :32].isfinite().all() for x in (of_q, of_k, of_v))


def test_reads_heads_where_they_lie() -> None:
    """Queries, keys and values are slices of one tensor, and the gradient of a sum is expanded."""
    s, n, d = 19, 2, 64
    qkv = torch.randn(s, 2, n, 3, d, requires_grad=True)
    softmax = softmax_of(Case(s))
    q, k, v = (part.permute(1, 2, 0, 3) for part in qkv.unbind(3))
    out = flash_attention(q, k, v, softmax)
    (grad,) = torch.autograd.grad(out.sum(), qkv)
    copies = [part.detach().contiguous().requires_grad_() for part in (q, k, v)]
    same = flash_attention(*copies, softmax)
    assert torch.equal(out, same)
    grads = torch.autograd.grad(same.sum(), copies)
    assert torch.equal(grad, torch.stack([x.permute(2, 0, 1, 3) for x in grads], dim=3))


def test_nothing_gives_nothing() -> None:
    parts = inputs(Case(0), torch.float32)
    assert [x.shape for x in computed(Case(0), parts)] == [parts[3].shape, *(x.shape for x in parts[:3])]


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter is no part of a graph")
def test_opcheck_and_compile() -> None:
    for name in ("gqa", "everything", "both sides"):
        case = CASES[name]
        q, k, v, grad = inputs(case, torch.float32)
        softmax = softmax_of(case)
        key = None if softmax.drop is None else torch.tensor(7)
        samples, base = (None, 0) if softmax.drop is None else (NUMBERS, softmax.drop.base)
        seen = softmax.slopes, *softmax.visible[:2]
        rest = *seen, samples, key, softmax.scale, case.p, base
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        torch.library.opcheck(torch.ops.megalite.flash_attention.default, (*leaves, *rest))
        saved = torch.ops.megalite.flash_attention(q, k, v, *rest)
        torch.library.opcheck(
            torch.ops.megalite.flash_attention_backward.default, (grad, q, k, v, *saved, *rest)
        )
    whole = torch.compile(flash_attention, backend="aot_eager", fullgraph=True)
    softmax = softmax._replace(drop=Drop(0.3, 0, NUMBERS, 0, torch.tensor(7)))
    assert torch.equal(whole(q, k, v, softmax), flash_attention(q, k, v, softmax))


def test_head_sizes_are_padded_to_powers_of_two() -> None:
    assert [padded(d) for d in (1, 16, 17, 64, 80, 96, 128, 192, 256)] == [
        16, 16, 32, 64, 128, 128, 128, 256, 256,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("capability", "shared_kib", "expected"),
    [
        ((8, 0), 163, SMALL_SIZES),
        ((8, 9), 99, SMALL_SIZES),
        ((9, 0), 227, {}),
        ((10, 0), 227, BLACKWELL_SIZES),
        ((10, 3), 227, BLACKWELL_SIZES),
        ((12, 0), 99, SMALL_SIZES),
    ],
    ids=str,
)
def test_gpus_have_their_block_sizes(capability: tuple[int, int], shared_kib: int, expected: object) -> None:
    assert different_sizes(capability[0], shared_kib << 10) == expected
