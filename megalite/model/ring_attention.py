"""Ring attention: keys and values of the context-parallel ranks pass each rank, and results are merged.

In step t, a rank receives keys and values of the rank t places before it, while it computes with those of the
step before (Liu et al. 2023, arXiv 2310.01889). They come directly from the rank that holds them, so slices
that no query of the receiver sees are not sent: those after its queries, and with a window those out of
reach. In backward, they come again, and the gradients of keys and values go back to the rank that holds them.

Shapes: s sequence, b microbatch, n query heads, g key/value heads, d head size, cp = cp.size. All heads are
those of one tensor-parallel rank. Values may have heads of another size, d'.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.config import ModelConfig
from megalite.distributed.axis import Axis
from megalite.distributed.collectives import Pending, start_shift
from megalite.distributed.held_positions import HeldPositions
from megalite.kernels import CausalSoftmax, Drop, VisibleKeys, add_sinks_, sinks_gradient
from megalite.model.attention_block import Block, Blocks, MergedAttention, merge_
from megalite.model.attention_core import SoftmaxCore
from megalite.tensor_parallel.parameter_spec import LayerContext


class RingStep(NamedTuple):
    """Describes one step: what a rank does with the keys of the rank `distance` places before it in the ring.

    Slices are those that a rank holds, by their place among them.

    Attributes:
        sent: slices of this rank that the rank `distance` places after it needs.
        received: slices of the rank `distance` places before it that this rank needs.
        blocks: a slice of this rank's queries and one of the received slices, whose keys it may see.
        positions: positions of the received slices, by their place among all slices of their rank.
    """

    distance: int
    sent: tuple[int, ...]
    received: tuple[int, ...]
    blocks: tuple[tuple[int, int], ...]
    positions: tuple[range, ...]


@cache
def ring_steps(own: HeldPositions, s: int, window: int | None, is_causal: bool) -> tuple[RingStep, ...]:
    """Return the steps of one rank, the first of which is with its own keys.

    A step in which no rank needs anything is skipped on all ranks.

    Args:
        s: length of a whole sample.
    """
    num_ranks, num_tokens = own.count, s // own.count

    def runs(rank: int) -> tuple[range, ...]:
        return HeldPositions(rank % num_ranks, num_ranks, own.is_zigzag).runs(num_tokens)

    def blocks(rank: int, distance: int) -> tuple[tuple[int, int], ...]:
        return tuple(
            (i, j)
            for i, queries in enumerate(runs(rank))
            for j, keys in enumerate(runs(rank - distance))
            if _sees(queries, keys, window, is_causal)
        )

    def keys(rank: int, distance: int) -> tuple[int, ...]:
        return tuple(sorted({j for _, j in blocks(rank, distance)}))

    return tuple(
        RingStep(
            distance,
            keys(own.index + distance, distance),
            keys(own.index, distance),
            blocks(own.index, distance),
            runs(own.index - distance),
        )
        for distance in range(num_ranks)
        if any(blocks(rank, distance) for rank in range(num_ranks))
    )


def _sees(queries: range, keys: range, window: int | None, is_causal: bool) -> bool:
    """Return whether some query sees some key, if documents allow it."""
    if is_causal and keys.start > queries[-1]:
        return False
    return window is None or keys[-1] >= queries.start - window


class Ring(NamedTuple):
    """Holds the arguments of ring attention besides tensors.

    Attributes:
        own: positions that this rank holds.
    """

    cp: Axis
    own: HeldPositions
    softmax: CausalSoftmax
    blocks: Blocks

    @property
    def steps(self) -> tuple[RingStep, ...]:
        """Return the steps of this rank."""
        visible = self.softmax.visible
        return ring_steps(self.own, self.softmax.seq_length, visible.window, visible.ends is None)

    @property
    def num_slices(self) -> int:
        """Return the number of slices that a rank holds."""
        return len(self.own.slices)

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the slices of a rank's ``[b, n, s/cp, ...]``."""
        return x.chunk(self.num_slices, dim=2)

    def arriving(self, k: Tensor, v: Tensor) -> Iterator[tuple[RingStep, dict[int, tuple[Tensor, Tensor]]]]:
        """Yield the steps with the keys and values of each received slice.

        The messages of a step run while the caller computes the step before.
        """
        own = dict(enumerate(zip(self.parts(k), self.parts(v), strict=True)))
        steps, sizes = self.steps, (k.shape[3], v.shape[3])
        pending = None
        for step, following in zip(steps, (*steps[1:], None), strict=True):
            arrived = own if pending is None else _unpacked(pending.wait(), step.received, own[0], sizes)
            pending = None
            if following is not None:
                packed = _packed([own[number] for number in following.sent], k)
                num_elements = len(following.received) * own[0][0].shape[:3].numel() * sum(sizes)
                pending = start_shift(packed, num_elements, following.distance, self.cp, of="keys and values")
            yield step, arrived


def _packed(pairs: Sequence[tuple[Tensor, Tensor]], like: Tensor) -> Tensor:
    """Return pairs of a slice's keys and values in one flat tensor, of the dtype of `like`."""
    flat = [torch.cat(pair, dim=3).to(like.dtype).flatten() for pair in pairs]
    return torch.cat(flat) if flat else like.new_empty(0)


def _unpacked(
    flat: Tensor, numbers: Sequence[int], like: tuple[Tensor, Tensor], sizes: tuple[int, int]
) -> dict[int, tuple[Tensor, Tensor]]:
    """Return what `_packed` packed, by the numbers of the slices.

    Args:
        like: keys and values of one slice.
        sizes: size of a head of keys, and of values.
    """
    whole = flat.view(len(numbers), *like[0].shape[:3], sum(sizes))
    pairs = zip(*whole.split(sizes, dim=4), strict=True)
    return dict(zip(numbers, pairs, strict=True))


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring, sinks: Tensor | None) -> Tensor:
        out, log_sums = _forward(q, k, v, ring)
        if sinks is not None:
            add_sinks_(out, log_sums, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, log_sums, *(() if sinks is None else (sinks,)))
        ctx.ring = ring
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (q, k, v, out, log_sums, *of_sinks) = grads, ctx.saved_tensors
        grad_sinks = None
        if of_sinks and ctx.needs_input_grad[4]:
            grad_sinks = sinks_gradient(grad, out, log_sums, of_sinks[0])
        return *_backward(grad, q, k, v, out, log_sums, ctx.ring), None, grad_sinks


def _forward(q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> tuple[Tensor, Tensor]:
    """Return the output ``[b, n, s/cp, d']`` without sinks and the logarithms of the sums, at least fp32."""
    results: dict[int, tuple[Tensor, Tensor]] = {}
    queries, runs = ring.parts(q), ring.own.runs(q.shape[2])
    for step, arrived in ring.arriving(k, v):
        for i, j in step.blocks:
            block = Block(runs[i], step.positions[j])
            result = ring.blocks.forward(queries[i], *arrived[j], block, ring.softmax)
            if i in results:
                merge_(*results[i], *result)
            else:
                results[i] = result
    outs, log_sums = zip(*(results[i] for i in range(len(queries))), strict=True)
    return torch.cat(outs, dim=2), torch.cat(log_sums, dim=2)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, ring: Ring
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of this rank's queries, keys and values."""
    deltas = (grad.to(log_sums.dtype) * out).sum(-1)
    whole = [
        MergedAttention(*parts) for parts in zip(*map(ring.parts, (grad, out, log_sums, deltas)), strict=True)
    ]
    queries = ring.parts(q)
    runs = ring.own.runs(q.shape[2])
    sums = tuple(torch.zeros_like(x, dtype=log_sums.dtype) for x in (q, k, v))
    grad_q, own = ring.parts(sums[0]), list(zip(*map(ring.parts, sums[1:]), strict=True))
    returning: tuple[RingStep, Pending] | None = None
    for step, arrived in ring.arriving(k, v):
        of_step = own if step.distance == 0 else [_zeros(pair) for pair in own]
        for i, j in step.blocks:
            block = Block(runs[i], step.positions[j])
            found = ring.blocks.backward(queries[i], *arrived[j], whole[i], block, ring.softmax)
            for total, more in zip((grad_q[i], *of_step[j]), found, strict=True):
                total += more
        _add_returned(returning, own)
        returning = (step, _start_return(of_step, step, k, ring)) if step.distance else None
    _add_returned(returning, own)
    return sums[0].to(q.dtype), sums[1].to(k.dtype), sums[2].to(v.dtype)


def _zeros(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(pair[0]), torch.zeros_like(pair[1])


def _start_return(
    gradients: Sequence[tuple[Tensor, Tensor]], step: RingStep, k: Tensor, ring: Ring
) -> Pending:
    """Start to send the gradients of received slices back to the rank that holds these."""
    packed = _packed([gradients[number] for number in step.received], k)
    num_elements = len(step.sent) * sum(x.numel() for x in gradients[0])
    return start_shift(packed, num_elements, -step.distance, ring.cp, of="gradients of keys and values")


def _add_returned(returning: tuple[RingStep, Pending] | None, own: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Add the gradients that another rank sends back to those of this rank's slices."""
    if returning is None:
        return
    step, pending = returning
    sizes = own[0][0].shape[3], own[0][1].shape[3]
    for number, pair in _unpacked(pending.wait(), step.sent, own[0], sizes).items():
        for total, more in zip(own[number], pair, strict=True):
            total += more


class RingCore(SoftmaxCore):
    """Computes attention in blocks of a rank's queries with the keys of each rank.

    Args:
        blocks: computes a block.
    """

    def __init__(self, config: ModelConfig, context: LayerContext, blocks: Blocks) -> None:
        super().__init__(config, context)
        self.cp, self.blocks = context.cp, blocks

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visible: VisibleKeys,
        drop: Drop,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute attention of a rank's queries with all keys; see `LayerCore`.

        Args:
            k, v: the rank's own, ``[b, g, s/cp, d]`` and ``[b, g, s/cp, d']``.
        """
        s = k.shape[2] * self.cp.size
        softmax = CausalSoftmax(s, self.scales[k.shape[3]], self.slopes, visible, drop, self.cap)
        ring = Ring(self.cp, self.own_positions, softmax, self.blocks)
        out: Tensor = _RingAttention.apply(q, k, v, ring, sinks)
        return out
