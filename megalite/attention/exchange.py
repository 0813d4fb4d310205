"""Let the queries of a slice of the sequence see the keys of the whole sequence, and recurrences its tokens.

A context-parallel rank computes queries, keys and values of its own tokens. Before the attention core, the
ranks all-gather keys and values (Llama Team 2024, section 3.3.2), or each rank exchanges heads for tokens
(DeepSpeed-Ulysses, Jacobs et al. 2023). With ring attention, attention itself communicates (`ring`). With
both, neighbouring ranks exchange heads for tokens, and each of them is in a ring with one rank of every other
group of neighbours (Fang and Zhao 2024, arXiv 2405.07719). Each layer may reach keys in its own way. A rank
holds the same tokens in all layers: two slices in zigzag order, unless all of them have a2a.

A recurrence needs the tokens of a sample one after another: ranks exchange tokens for heads before it, and
back after it, however attention reaches keys (`HeadExchange`).

Shapes: s sequence, b microbatch, n query heads, g key/value heads, d head size, p ranks. All heads are
those of one tensor-parallel rank. Values may have heads of another size. If neighbours exchange heads, s is
the number of tokens that they hold together, and p their number. Functions that return all of s tokens order
them by position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.attention.positions import PositionInfo
from megalite.distributed.axis import Axis, HeldPositions
from megalite.distributed.collectives import (
    all_gather_from,
    all_to_all,
    gather_from_sequence_parallel,
    with_conjugate,
)
from megalite.kernels.packed_heads import Heads
from megalite.tensor_parallel.parameter_spec import LayerContext


class KeyRanks(NamedTuple):
    """Ranks that queries, keys and values are exchanged with before attention.

    Attributes:
        order: positions of the rank's tokens among those that these ranks hold together.
    """

    axis: Axis
    order: HeldPositions

    @staticmethod
    def of(context: LayerContext) -> KeyRanks:
        """Return the ranks of a layer: those that exchange heads with each other, or all."""
        axis = context.head_ranks or context.topology.position_ranks
        # In zigzag order, the first slices of neighbours follow each other, and their last ones in reverse.
        return KeyRanks(axis, HeldPositions(axis.rank, axis.size, context.topology.positions.is_zigzag))


class KeyAccess(NamedTuple):
    """Ways of queries to the keys of other ranks; both functions undo each other.

    Attributes:
        enter: maps queries ``[s/p, b, n, d]``, and keys and values ``[s/p, b, g, d]``, to the arguments of
            the attention core.
        leave: maps the core's output to ``[s/p, b, n, d]``.
    """

    enter: Callable[[Tensor, Tensor, Tensor, KeyRanks], Heads]
    leave: Callable[[Tensor, KeyRanks], Tensor]


def gather_keys(q: Tensor, k: Tensor, v: Tensor, ranks: KeyRanks) -> Heads:
    """Return the rank's queries with all keys and values ``[s, b, g, d]``.

    Backward reduce-scatters the gradients of keys and values.
    """
    gathered = gather_from_sequence_parallel(torch.cat((k, v), dim=3), ranks.axis)
    k, v = ranks.order.in_position_order(gathered).split((k.shape[3], v.shape[3]), dim=3)
    return q, k, v


def exchange_tokens_for_heads(q: Tensor, k: Tensor, v: Tensor, ranks: KeyRanks) -> Heads:
    """Return all tokens of a part of the heads: ``[s, b, n/p, d]``, and twice ``[s, b, max(1, g/p), d]``.

    Several ranks get a copy of a key/value head if there are fewer of them than ranks.
    """
    axis = ranks.axis
    if q.shape[2] == k.shape[2]:
        whole = all_tokens_of_heads(torch.cat((q, k, v), dim=3), axis)
        sizes, dim = [x.shape[3] for x in (q, k, v)], 3
    else:
        copies = max(1, axis.size // k.shape[2])
        heads = q, *(x.repeat_interleave(copies, dim=2) if copies > 1 else x for x in (k, v))
        parts = [x.unflatten(2, (axis.size, -1)) for x in heads]  # [s/p, b, p, n/p, d]
        whole = all_tokens_of_heads(torch.cat(parts, dim=3).flatten(2, 3), axis)
        sizes, dim = [part.shape[3] for part in parts], 2
    q, k, v = ranks.order.in_position_order(whole).split(sizes, dim)
    return q, k, v


def return_heads_for_tokens(y: Tensor, ranks: KeyRanks) -> Tensor:
    """Return the rank's tokens of all heads: ``[s, b, n/p, d]`` to ``[s/p, b, n, d]``."""
    return exchange_heads_for_tokens(ranks.order.in_rank_order(y), ranks.axis)


def all_tokens_of_heads(x: Tensor, axis: Axis) -> Tensor:
    """Return all tokens of a part of the heads: ``[s/p, b, n, d]`` to ``[s, b, n/p, d]``.

    They are in the order of the ranks that held them.
    """
    return with_conjugate(x, axis, _to_heads, _to_tokens)


def exchange_heads_for_tokens(y: Tensor, axis: Axis) -> Tensor:
    """Undo `all_tokens_of_heads`: ``[s, b, n/p, d]`` to ``[s/p, b, n, d]``."""
    return with_conjugate(y, axis, _to_tokens, _to_heads)


def key_access(context: LayerContext) -> KeyAccess:
    """Return how the queries of a layer reach the keys of other ranks before its kernel runs."""
    if context.head_ranks is not None and context.head_ranks.size > 1:
        return KeyAccess(exchange_tokens_for_heads, return_heads_for_tokens)
    if context.gathers_keys:
        return KeyAccess(gather_keys, lambda y, ranks: y)
    return KeyAccess(lambda q, k, v, ranks: (q, k, v), lambda y, ranks: y)  # a ring brings them to the kernel


def _exchanged(x: Tensor, axis: Axis) -> Tensor:
    """Send ``x[i]`` of ``[p, ...]`` to rank i, and return what the ranks sent, in their order."""
    sizes = [x.numel() // axis.size] * axis.size
    return all_to_all(x.contiguous().view(-1), sizes, sizes, axis).view(x.shape)


def _to_heads(x: Tensor, axis: Axis) -> Tensor:
    """Map ``[s/p, b, n, d]`` to ``[s, b, n/p, d]``."""
    return _exchanged(x.unflatten(2, (axis.size, -1)).movedim(2, 0), axis).flatten(0, 1)


def _to_tokens(x: Tensor, axis: Axis) -> Tensor:
    """Map ``[s, b, n/p, d]`` to ``[s/p, b, n, d]``."""
    return _exchanged(x.unflatten(0, (axis.size, -1)), axis).movedim(0, 2).flatten(2, 3)


class HeadExchange:
    """Exchanges of tokens for heads between context-parallel ranks, for a recurrent layer.

    If the ranks hold zigzag slices or assigned documents, tokens are put into the order of positions. In
    generation, each rank has the tokens after the prompt, and keeps the states of its heads. c is the number
    of features of one tensor-parallel rank, grouped by head.

    Every rank has the parameters of all heads, and uses those of its part. The gradients of the other heads
    are zeros, and the sum over the replicas of a parameter, to which these ranks belong, is complete.
    """

    def __init__(self, context: LayerContext) -> None:
        self.ranks, self.positions = context.topology.position_ranks, context.topology.positions

    def to_heads(self, x: Tensor, positions: PositionInfo) -> Tensor:
        """Return all tokens of the rank's heads: ``[s/p, b, c]`` to ``[s, b, c/p]``.

        If every rank has all tokens, ``[s, b, c]``, it selects its heads.
        """
        if self.ranks.size == 1:
            return x
        if positions.is_replicated:
            return x.chunk(self.ranks.size, dim=-1)[self.ranks.rank]
        heads = x.unflatten(-1, (self.ranks.size, -1))  # [s/p, b, p, c/p]
        tokens = all_tokens_of_heads(heads, self.ranks).flatten(2)
        if positions.rank_order is None:
            return self.positions.in_position_order(tokens)
        return _rows(tokens, positions.rank_order.argsort(dim=0))

    def to_tokens(self, y: Tensor, positions: PositionInfo) -> Tensor:
        """Return all heads of the rank's tokens: ``[s, b, c/p]`` to ``[s/p, b, c]``, or all tokens."""
        if self.ranks.size == 1:
            return y
        if positions.is_replicated:
            return all_gather_from(y, self.ranks)
        order = positions.rank_order
        tokens = self.positions.in_rank_order(y) if order is None else _rows(y, order)
        return exchange_heads_for_tokens(tokens.unsqueeze(2), self.ranks).flatten(2)

    def own(self, parameter: Tensor) -> Tensor:
        """Return the part of a parameter that belongs to the rank's heads, which dim 0 lists in order."""
        return parameter if self.ranks.size == 1 else parameter.chunk(self.ranks.size)[self.ranks.rank]


def _rows(x: Tensor, order: Tensor) -> Tensor:
    """Return the rows of ``[s, b, c]`` in an order of each sample's own, ``[s, b]``."""
    return x.gather(0, order.unsqueeze(-1).expand_as(x))
