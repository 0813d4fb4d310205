"""The word embedding, cut over the tensor-parallel axis by the vocabulary (Shoeybi et al. 2019)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megalite.parallel.collectives import reduce_from, scatter_sum
from megalite.parallel.shard import ParameterSpec, Placement, Shard, new_parameter


class VocabParallelEmbedding(nn.Module):
    """The word table cut by rows: each rank looks up the tokens of its own range, the sum has them all.

    Args:
        num_padding: rows at the end that stand for no token.
    """

    def __init__(
        self, num_rows: int, hidden_size: int, place: Placement, *, std: float, num_padding: int = 0
    ) -> None:
        super().__init__()
        self.tp = place.tp
        self.leave = scatter_sum if place.sequence_parallel else reduce_from
        spec = ParameterSpec((num_rows, hidden_size), Shard("tp", 0), std=std, num_padding=num_padding)
        self.weight = new_parameter(spec, place)  # [rows/t, h]

    def forward(self, tokens: Tensor) -> Tensor:
        """``[s, b]`` token ids -> ``[s, b, h]``, or ``[s/t, b, h]`` if sequence parallel."""
        if self.tp.size == 1:
            return F.embedding(tokens, self.weight)
        num_rows = self.weight.shape[0]
        rows = tokens - self.tp.rank * num_rows
        foreign = (rows < 0) | (rows >= num_rows)
        found = F.embedding(rows.masked_fill(foreign, 0), self.weight).masked_fill(foreign[..., None], 0.0)
        return self.leave(found, self.tp)
