"""Give each context-parallel rank all tokens of a part of a recurrent layer's heads.

A recurrence needs the tokens of a sample one after another. As in DeepSpeed-Ulysses (Jacobs et al. 2023),
ranks exchange tokens for heads before it, and heads for tokens after it. It does not matter how attention
reaches the keys of other ranks: if they hold zigzag slices or assigned documents, tokens are put into the
order of positions. In generation, each rank has the tokens after the prompt, and keeps the states of its
heads.

Shapes: s sequence, b microbatch, c features of one tensor-parallel rank, grouped by head, cp = cp.size.
"""

from __future__ import annotations

from torch import Tensor

from megalite.distributed.collectives import all_gather_from
from megalite.model.context_parallel import all_tokens_of_heads, exchange_heads_for_tokens
from megalite.model.positions import PositionInfo
from megalite.tensor_parallel.parameter_spec import LayerContext


class HeadExchange:
    """Exchanges tokens for heads between context-parallel ranks.

    Every rank has the parameters of all heads, and uses those of its part. The gradients of the other heads
    are zeros, and the sum over the replicas of a parameter, to which these ranks belong, is complete.
    """

    def __init__(self, context: LayerContext) -> None:
        self.cp, self.positions = context.cp, context.topology.positions

    def to_heads(self, x: Tensor, positions: PositionInfo) -> Tensor:
        """Return all tokens of the rank's heads: ``[s/cp, b, c]`` to ``[s, b, c/cp]``.

        If every rank has all tokens, ``[s, b, c]``, it selects its heads.
        """
        if self.cp.size == 1:
            return x
        if positions.is_replicated:
            return x.chunk(self.cp.size, dim=-1)[self.cp.rank]
        heads = x.unflatten(-1, (self.cp.size, -1))  # [s/cp, b, cp, c/cp]
        tokens = all_tokens_of_heads(heads, self.cp).flatten(2)
        if positions.rank_order is None:
            return self.positions.in_position_order(tokens)
        return _rows(tokens, positions.rank_order.argsort(dim=0))

    def to_tokens(self, y: Tensor, positions: PositionInfo) -> Tensor:
        """Return all heads of the rank's tokens: ``[s, b, c/cp]`` to ``[s/cp, b, c]``, or all tokens."""
        if self.cp.size == 1:
            return y
        if positions.is_replicated:
            return all_gather_from(y, self.cp)
        order = positions.rank_order
        tokens = self.positions.in_rank_order(y) if order is None else _rows(y, order)
        return exchange_heads_for_tokens(tokens.unsqueeze(2), self.cp).flatten(2)

    def own(self, parameter: Tensor) -> Tensor:
        """Return the part of a parameter that belongs to the rank's heads, which dim 0 lists in order."""
        return parameter if self.cp.size == 1 else parameter.chunk(self.cp.size)[self.cp.rank]


def _rows(x: Tensor, order: Tensor) -> Tensor:
    """Return the rows of ``[s, b, c]`` in an order of each sample's own, ``[s, b]``."""
    return x.gather(0, order.unsqueeze(-1).expand_as(x))
