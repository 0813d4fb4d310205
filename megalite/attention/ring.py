"""Ring attention: keys and values of the context-parallel ranks pass each rank, and results are merged.

`GatheredKeys` merges blocks with keys that are all on the rank already.

In step t, a rank receives keys and values of the rank t places before it, while it computes with those of the
step before (Liu et al. 2023, arXiv 2310.01889). They come directly from the rank that holds them, so slices
that no query of the receiver sees are not sent: those after its queries, with a window those out of reach,
and with assigned documents those of other documents. In backward, they come again, and the gradients of keys
and values go back to the rank that holds them.

Shapes: s sequence, b microbatch, n query heads, g key/value heads, d head size. All heads are those that one
rank computes. Values may have heads of another size, d'.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.attention.kernels import Block, BlockKernel, MergedAttention, merge_
from megalite.data.document_assignment import Assignment, DocumentRun
from megalite.distributed.axis import Axis, HeldPositions
from megalite.distributed.collectives import Pending, start_shift
from megalite.kernels import CausalSoftmax


class RingStep(NamedTuple):
    """Slices of one step: what a rank does with the keys of the rank `distance` places before it in the ring.

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

    def groups(self, joins_slices: bool) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Yield slices of queries and of keys that are computed together: those of one block, or of all."""
        if joins_slices and self.blocks:
            queries, keys = zip(*self.blocks, strict=True)
            yield tuple(sorted(set(queries))), tuple(sorted(set(keys)))
            return
        for i, j in self.blocks:
            yield (i,), (j,)


class BlockCall(NamedTuple):
    """Places of one computation of a step.

    Attributes:
        slices: slices of queries.
        rows: tokens of the queries among those of this rank.
        columns: tokens of the keys among the received ones.
        block: positions of both.
    """

    slices: tuple[int, ...]
    rows: slice
    columns: slice
    block: Block


@cache
def slices_of_ranks(own: HeldPositions, s: int) -> Assignment:
    """Return the slices that each rank holds of a sample of length s, as runs of one document."""
    ranks = (replace(own, index=rank) for rank in range(own.count))
    return Assignment(
        tuple(tuple(DocumentRun(range(s), run) for run in each.ranges(s // own.count)) for each in ranks)
    )


@lru_cache(maxsize=256)
def ring_steps(held: Assignment, own: int, window: int | None, is_causal: bool) -> tuple[RingStep, ...]:
    """Return the steps of one rank, the first of which is with its own keys.

    A step in which no rank needs anything is skipped on all ranks.

    Args:
        held: positions of each rank.
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


class Ring:
    """Blocks of a rank's queries with the keys of each rank of a ring, and their merge; a `Computation`.

    Args:
        axis: the ranks that form the ring.
        held: positions of each of them.
    """

    keeps_output = True

    def __init__(self, axis: Axis, held: Assignment, softmax: CausalSoftmax, kernel: BlockKernel) -> None:
        visible = softmax.visible
        self.axis, self.softmax, self.kernel = axis, softmax, kernel
        self.steps = ring_steps(held, axis.rank, visible.window, visible.ends is None)
        self.runs = [run.positions for run in held.ranks[axis.rank]]  # of this rank's slices
        self.rows = _slices_of_runs(self.runs)  # tokens of each slice, among those of this rank

    def calls(self, step: RingStep) -> Iterator[BlockCall]:
        """Yield the computations of a step."""
        runs, rows = self.runs, self.rows
        received = [step.positions[number] for number in step.received]
        columns = dict(zip(step.received, _slices_of_runs(received), strict=True))
        joins_slices = self.kernel.joins_slices and self.softmax.visible.assignments is None
        for queries, keys in step.groups(joins_slices):
            block = Block.around([runs[i] for i in queries], [step.positions[j] for j in keys])
            of_queries, of_keys = [rows[i] for i in queries], [columns[j] for j in keys]
            yield BlockCall(queries, _whole_slice(of_queries), _whole_slice(of_keys), block)

    def arriving(self, k: Tensor, v: Tensor) -> Iterator[tuple[RingStep, tuple[Tensor, Tensor]]]:
        """Yield the steps with the keys and values of the received slices, ``[b, g, e, d or d']``.

        The messages of a step run while the caller computes the step before.
        """
        steps, sizes = self.steps, (k.shape[3], v.shape[3])
        of_token = k.shape[0] * k.shape[1] * sum(sizes)
        pending = None
        for step, following in zip(steps, (*steps[1:], None), strict=True):
            arrived = (k, v) if pending is None else _unpacked(pending.wait(), k, sizes)
            pending = None
            if following is not None:
                rows = [self.rows[number] for number in following.sent]
                packed = _packed(_tokens_of(k, rows), _tokens_of(v, rows))
                num_tokens = sum(len(following.positions[number]) for number in following.received)
                pending = start_shift(
                    packed, num_tokens * of_token, following.distance, self.axis, of="keys and values"
                )
            yield step, arrived

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the blocks of all steps; see `Computation`."""
        results: dict[int, tuple[Tensor, Tensor]] = {}  # of each slice of queries
        for step, (keys, values) in self.arriving(k, v):
            for slices, rows, columns, block in self.calls(step):
                found = self.kernel.forward(
                    q[:, :, rows], keys[:, :, columns], values[:, :, columns], block, self.softmax
                )
                lengths = [len(self.runs[i]) for i in slices]
                parts = zip(*(x.split(lengths, dim=2) for x in found), strict=True)
                for i, result in zip(slices, parts, strict=True):
                    if i in results:
                        merge_(*results[i], *result)
                    else:
                        results[i] = result
        outs, log_sums = zip(*(results[i] for i in sorted(results)), strict=True)
        return torch.cat(outs, dim=2), torch.cat(log_sums, dim=2)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, log_sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of this rank's queries, keys and values; see `Computation`."""
        assert out is not None
        wide = log_sums.dtype
        whole = MergedAttention(grad, out, log_sums, (grad.to(wide) * out).sum(-1))
        grad_q, *own = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
        returning: tuple[list[slice], Pending] | None = None
        for step, (keys, values) in self.arriving(k, v):
            of_step = [torch.zeros_like(x, dtype=wide) for x in (keys, values)] if step.distance else own
            for _, rows, columns, block in self.calls(step):
                found = self.kernel.backward(
                    q[:, :, rows],
                    keys[:, :, columns],
                    values[:, :, columns],
                    whole.rows(rows),
                    block,
                    self.softmax,
                )
                grad_q[:, :, rows] += found[0]
                for total, more in zip(of_step, found[1:], strict=True):
                    total[:, :, columns] += more
            _add_returned(returning, own)
            returning = _start_return(of_step, step, k, self) if step.distance else None
        _add_returned(returning, own)
        return grad_q.to(q.dtype), own[0].to(k.dtype), own[1].to(v.dtype)


class GatheredKeys(Ring):
    """Blocks of a rank's slices of queries with the gathered keys of the whole sample, in one step.

    In causal attention, a slice has two blocks: with the keys before the slice, all of which it sees, and
    with its own. PyTorch's FlashAttention computes both without a mask in memory.

    Args:
        runs: positions of each slice of queries.
    """

    def __init__(self, runs: Sequence[range], softmax: CausalSoftmax, kernel: BlockKernel) -> None:
        self.runs, self.softmax, self.kernel = list(runs), softmax, kernel
        self.rows = _slices_of_runs(runs)

    def calls(self, step: RingStep) -> Iterator[BlockCall]:
        """Yield the computations of the step: those of each slice of queries."""
        for i, (run, rows) in enumerate(zip(self.runs, self.rows, strict=True)):
            for keys in (run, range(run.start)):
                if keys:
                    yield BlockCall((i,), rows, slice(keys.start, keys.stop), Block(run, keys))

    def arriving(self, k: Tensor, v: Tensor) -> Iterator[tuple[RingStep, tuple[Tensor, Tensor]]]:
        """Yield one step, with all keys and values."""
        yield RingStep(0, (), (), (), ()), (k, v)


def _slices_of_runs(runs: Sequence[range]) -> list[slice]:
    """Return the places of the tokens of some runs, if they follow each other."""
    ends = list(accumulate(map(len, runs), initial=0))
    return [slice(*bounds) for bounds in pairwise(ends)]


def _whole_slice(slices: Sequence[slice]) -> slice:
    """Return slices that follow each other as one."""
    return slice(slices[0].start, slices[-1].stop)


def _tokens_of(x: Tensor, slices: Sequence[slice]) -> Tensor:
    """Return some tokens of ``[b, g, e, d]``, without a copy if they follow each other."""
    if not slices:
        return x[:, :, :0]
    if all(one.stop == following.start for one, following in pairwise(slices)):
        return x[:, :, _whole_slice(slices)]
    return torch.cat([x[:, :, each] for each in slices], dim=2)


def _packed(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat((k, v), dim=3).flatten()


def _unpacked(flat: Tensor, k: Tensor, sizes: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return what `_packed` packed.

    Args:
        k: keys of some tokens of as many samples and heads.
        sizes: size of a head of keys, and of values.
    """
    whole = flat.view(*k.shape[:2], -1, sum(sizes))
    keys, values = whole.split(sizes, dim=3)
    return keys, values


def _start_return(
    gradients: Sequence[Tensor], step: RingStep, k: Tensor, ring: Ring
) -> tuple[list[slice], Pending]:
    """Start to send gradients of received keys and values back to the rank that holds these.

    Returns:
        This rank's tokens that another rank received, and the message with their gradients.
    """
    packed = _packed(*(x.to(k.dtype) for x in gradients))
    sent = [ring.rows[number] for number in step.sent]
    num_tokens = sum(rows.stop - rows.start for rows in sent)
    num_elements = k.shape[:2].numel() * num_tokens * sum(x.shape[3] for x in gradients)
    return sent, start_shift(
        packed, num_elements, -step.distance, ring.axis, of="gradients of keys and values"
    )


def _add_returned(returning: tuple[list[slice], Pending] | None, own: Sequence[Tensor]) -> None:
    """Add the gradients that another rank sends back to those of this rank's keys and values."""
    if returning is None:
        return
    sent, pending = returning
    sizes = own[0].shape[3], own[1].shape[3]
    lengths = [rows.stop - rows.start for rows in sent]
    for total, returned in zip(own, _unpacked(pending.wait(), own[0], sizes), strict=True):
        for rows, more in zip(sent, returned.split(lengths, dim=2), strict=True):
            total[:, :, rows] += more
