"""Ring attention: keys and values of the context-parallel ranks pass each rank, and results are merged.

In step t, a rank receives keys and values of the rank t places before it, while it computes with those of the
step before (Liu et al. 2023, arXiv 2310.01889). They come directly from the rank that holds them, so slices
that no query of the receiver sees are not sent: those after its queries, with a window those out of reach,
and with dealt documents those of other documents. In backward, they come again, and the gradients of keys and
values go back to the rank that holds them.

Shapes: s sequence, b microbatch, n query heads, g key/value heads, d head size, cp = cp.size. All heads are
those of one tensor-parallel rank. Values may have heads of another size, d'.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.config import ModelConfig
from megalite.distributed.axis import Axis
from megalite.distributed.collectives import Pending, start_shift
from megalite.distributed.held_positions import HeldPositions
from megalite.document_deal import Deal, DocumentRun
from megalite.kernels import CausalSoftmax, Drop, VisibleKeys, add_sinks_, sinks_gradient
from megalite.microbatch import Microbatch
from megalite.model.attention_block import Block, Blocks, MergedAttention, merge_
from megalite.model.attention_core import SoftmaxCore
from megalite.model.positions import PositionInfo
from megalite.tensor_parallel.parameter_spec import LayerContext

KeysAndValues = dict[int, tuple[Tensor, Tensor]]
"""Keys ``[b, g, tokens, d]`` and values ``[b, g, tokens, d']`` of slices, by the numbers of the slices."""


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

    @property
    def lengths_received(self) -> dict[int, int]:
        """Return the numbers of tokens of the received slices."""
        return {number: len(self.positions[number]) for number in self.received}


@cache
def slices_of_ranks(own: HeldPositions, s: int) -> Deal:
    """Return the slices that each rank holds of a sample of length s, as runs of one document."""
    ranks = (replace(own, index=rank) for rank in range(own.count))
    return Deal(
        tuple(tuple(DocumentRun(range(s), run) for run in each.runs(s // own.count)) for each in ranks)
    )


@lru_cache(maxsize=256)
def ring_steps(held: Deal, own: int, window: int | None, is_causal: bool) -> tuple[RingStep, ...]:
    """Return the steps of one rank, the first of which is with its own keys.

    A step in which no rank needs anything is skipped on all ranks.

    Args:
        held: positions of each rank.
        own: the rank.
    """
    ranks, num_ranks = held.ranks, len(held.ranks)

    def blocks(rank: int, distance: int) -> tuple[tuple[int, int], ...]:
        queries, keys = ranks[rank % num_ranks], ranks[(rank - distance) % num_ranks]
        return _blocks(queries, keys, window, is_causal)

    def keys(rank: int, distance: int) -> tuple[int, ...]:
        return tuple(sorted({j for _, j in blocks(rank, distance)}))

    return tuple(
        RingStep(
            distance,
            keys(own + distance, distance),
            keys(own, distance),
            blocks(own, distance),
            tuple(run.positions for run in ranks[(own - distance) % num_ranks]),
        )
        for distance in range(num_ranks)
        if any(blocks(rank, distance) for rank in range(num_ranks))
    )


def _blocks(
    queries: Sequence[DocumentRun], keys: Sequence[DocumentRun], window: int | None, is_causal: bool
) -> tuple[tuple[int, int], ...]:
    """Return the numbers of a run of queries and one of keys, for each pair in which some key is seen."""
    of_document = defaultdict(list)
    for number, run in enumerate(keys):
        of_document[run.document].append(number)
    return tuple(
        (i, j)
        for i, run in enumerate(queries)
        for j in of_document.get(run.document, ())
        if _sees(run.positions, keys[j].positions, window, is_causal)
    )


def _sees(queries: range, keys: range, window: int | None, is_causal: bool) -> bool:
    """Return whether some query sees some key of its document."""
    if is_causal and keys.start > queries[-1]:
        return False
    return window is None or keys[-1] >= queries.start - window


class Ring(NamedTuple):
    """Holds the arguments of ring attention besides tensors.

    Attributes:
        held: positions of each rank.
    """

    cp: Axis
    held: Deal
    softmax: CausalSoftmax
    blocks: Blocks

    @property
    def steps(self) -> tuple[RingStep, ...]:
        """Return the steps of this rank."""
        visible = self.softmax.visible
        return ring_steps(self.held, self.cp.rank, visible.window, visible.ends is None)

    @property
    def runs(self) -> list[range]:
        """Return the positions of this rank's slices."""
        return [run.positions for run in self.held.ranks[self.cp.rank]]

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the slices of a rank's ``[b, n, s/cp, ...]``."""
        return x.split([len(run) for run in self.runs], dim=2)

    def arriving(self, k: Tensor, v: Tensor) -> Iterator[tuple[RingStep, KeysAndValues]]:
        """Yield the steps with the keys and values of each received slice.

        The messages of a step run while the caller computes the step before.
        """
        own = dict(enumerate(zip(self.parts(k), self.parts(v), strict=True)))
        steps, pending = self.steps, None
        for step, following in zip(steps, (*steps[1:], None), strict=True):
            arrived = own if pending is None else _unpacked(pending.wait(), step.lengths_received, k, v)
            pending = None
            if following is not None:
                packed = _packed([own[number] for number in following.sent], k)
                num_elements = sum(following.lengths_received.values()) * _elements_of_token(k, v)
                pending = start_shift(packed, num_elements, following.distance, self.cp, of="keys and values")
            yield step, arrived


def _packed(pairs: Sequence[tuple[Tensor, Tensor]], like: Tensor) -> Tensor:
    """Return pairs of a slice's keys and values in one flat tensor, of the dtype of `like`."""
    flat = [torch.cat(pair, dim=3).to(like.dtype).flatten() for pair in pairs]
    return torch.cat(flat) if flat else like.new_empty(0)


def _unpacked(flat: Tensor, lengths: Mapping[int, int], k: Tensor, v: Tensor) -> KeysAndValues:
    """Return what `_packed` packed, by the numbers of the slices.

    Args:
        lengths: tokens of each slice, by its number.
        k, v: keys and values of a rank, ``[b, g, s/cp, d]`` and ``[b, g, s/cp, d']``.
    """
    sizes = k.shape[3], v.shape[3]
    parts = flat.split([length * _elements_of_token(k, v) for length in lengths.values()])
    shaped = (part.view(*k.shape[:2], -1, sum(sizes)) for part in parts)
    return {number: part.split(sizes, dim=3) for number, part in zip(lengths, shaped, strict=True)}


def _elements_of_token(k: Tensor, v: Tensor) -> int:
    """Return the elements of keys and values at one position of the samples."""
    return k.shape[:2].numel() * (k.shape[3] + v.shape[3])


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
    queries, runs = ring.parts(q), ring.runs
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
    queries, runs = ring.parts(q), ring.runs
    sums = tuple(torch.zeros_like(x, dtype=log_sums.dtype) for x in (q, k, v))
    grad_q, own = ring.parts(sums[0]), dict(enumerate(zip(*map(ring.parts, sums[1:]), strict=True)))
    returning: tuple[RingStep, Pending] | None = None
    for step, arrived in ring.arriving(k, v):
        of_step = own if step.distance == 0 else _zeros(arrived, log_sums.dtype)
        for i, j in step.blocks:
            block = Block(runs[i], step.positions[j])
            found = ring.blocks.backward(queries[i], *arrived[j], whole[i], block, ring.softmax)
            for total, more in zip((grad_q[i], *of_step[j]), found, strict=True):
                total += more
        _add_returned(returning, sums[1:], ring)
        returning = (step, _start_return(of_step, step, k, v, ring)) if step.distance else None
    _add_returned(returning, sums[1:], ring)
    return sums[0].to(q.dtype), sums[1].to(k.dtype), sums[2].to(v.dtype)


def _zeros(pairs: KeysAndValues, dtype: torch.dtype) -> KeysAndValues:
    """Return zeros in the shapes of keys and values."""
    return {
        number: (torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype))
        for number, (k, v) in pairs.items()
    }


def _start_return(gradients: KeysAndValues, step: RingStep, k: Tensor, v: Tensor, ring: Ring) -> Pending:
    """Start to send the gradients of received slices back to the rank that holds these."""
    packed = _packed([gradients[number] for number in step.received], k)
    num_elements = sum(len(ring.runs[number]) for number in step.sent) * _elements_of_token(k, v)
    return start_shift(packed, num_elements, -step.distance, ring.cp, of="gradients of keys and values")


def _add_returned(returning: tuple[RingStep, Pending] | None, sums: Sequence[Tensor], ring: Ring) -> None:
    """Add the gradients that another rank sends back to those of this rank's slices.

    Args:
        sums: gradients of this rank's keys and values.
    """
    if returning is None:
        return
    step, pending = returning
    own = list(zip(*map(ring.parts, sums), strict=True))
    lengths = {number: len(ring.runs[number]) for number in step.sent}
    for number, pair in _unpacked(pending.wait(), lengths, *sums).items():
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

    def position_info(self, microbatch: Microbatch) -> PositionInfo:
        """Return the positions of a microbatch's tokens, with the deals of its samples."""
        info = super().position_info(microbatch)
        visible = {window: keys._replace(deals=microbatch.deals) for window, keys in info.visible.items()}
        return info._replace(visible=visible)

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
        if visible.deals is None:
            return self._attend(q, k, v, softmax, slices_of_ranks(self.own_positions, s), sinks)
        of_samples = [
            self._attend(q[i : i + 1], k[i : i + 1], v[i : i + 1], _of_sample(softmax, i), deal, sinks)
            for i, deal in enumerate(visible.deals)
        ]
        return torch.cat(of_samples)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, softmax: CausalSoftmax, held: Deal, sinks: Tensor | None
    ) -> Tensor:
        out: Tensor = _RingAttention.apply(q, k, v, Ring(self.cp, held, softmax, self.blocks), sinks)
        return out


def _of_sample(softmax: CausalSoftmax, index: int) -> CausalSoftmax:
    """Return the softmax of one of the samples."""
    own, drop = slice(index, index + 1), softmax.drop
    if drop is not None:
        drop = drop._replace(sample_numbers=drop.sample_numbers[own])
    return softmax._replace(visible=softmax.visible.part(own), drop=drop)
