"""The word embedding, sharded over tensor-parallel ranks along the vocabulary (Shoeybi et al. 2019)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megalite.distributed.collectives import (
    reduce_from_tensor_parallel,
    reduce_scatter_to_sequence_parallel,
)
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterSpec, new_parameter
from megalite.tensor_parallel.placement import Cut


class VocabParallelEmbedding(nn.Module):
    """Embedding table that is cut along its rows; the ranks' results are summed.

    Args:
        num_padding: number of unused rows at the end.
    """

    def __init__(
        self, num_rows: int, hidden_size: int, context: LayerContext, *, std: float, num_padding: int = 0
    ) -> None:
        super().__init__()
        self.tp = context.tp
        sp = context.sequence_parallel
        self.reduce = reduce_scatter_to_sequence_parallel if sp else reduce_from_tensor_parallel
        spec = ParameterSpec(
            (num_rows, hidden_size), Cut("tp", 0), std=std, num_padding=num_padding, is_vocabulary=True
        )
        self.weight = new_parameter(spec, context)  # [rows/tp, h]

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up ``[s, b]`` token ids -> ``[s, b, h]``, or ``[s/tp, b, h]`` if sequence parallel."""
        if self.tp.size == 1:
            return F.embedding(tokens, self.weight)
        num_rows = self.weight.shape[0]
        rows = tokens - self.tp.rank * num_rows
        is_elsewhere = (rows < 0) | (rows >= num_rows)
        found = F.embedding(rows.masked_fill(is_elsewhere, 0), self.weight)
        return self.reduce(found.masked_fill(is_elsewhere[..., None], 0.0), self.tp)
