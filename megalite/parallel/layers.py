"""Linear layers and the embedding, cut over the tensor-parallel axis (Shoeybi et al. 2019, section 3).

Shapes: s sequence, b microbatch, h hidden size, t = tp.size.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from megalite.parallel.collectives import reduce_from, scatter_sum
from megalite.parallel.fp8 import Fp8Arithmetic
from megalite.parallel.linear import PLAIN, Arithmetic, column_product, row_product
from megalite.parallel.shard import ParameterSpec, Placement, Shard, new_parameter


class ColumnParallelLinear(nn.Module):
    """y = x A^T + b with A cut by its output features: each rank makes its slice of y from the whole x.

    Args:
        out_shape: shape of the output features. Only its last dim is cut: ``(2, ffn)`` gives every rank the
            same slice of each of SwiGLU's two halves.
        adds_bias: else it makes x A^T alone, and leaves `bias` to who adds it with what comes next.
        std: of the initial weights.
    """

    def __init__(
        self,
        in_features: int,
        out_shape: tuple[int, ...],
        place: Placement,
        *,
        bias: bool,
        std: float,
        adds_bias: bool = True,
    ) -> None:
        super().__init__()
        self.product = column_product(place, arithmetic_of(place))
        shard = Shard("tp", len(out_shape) - 1)
        weight = ParameterSpec((*out_shape, in_features), shard, std=std)  # [..., out, in]
        self.weight = new_parameter(weight, place)  # [..., out/t, in]
        self.bias = (
            new_parameter(ParameterSpec(out_shape, shard, decay=False), place) if bias else None
        )  # [..., out/t]
        self.adds_bias = adds_bias

    def forward(self, x: Tensor) -> Tensor:
        """``[s, b, in]``, or ``[s/t, b, in]`` if sequence parallel -> ``[s, b, prod(out_shape)/t]``."""
        return self.product(x, self.weight, self.bias if self.adds_bias else None)


class RowParallelLinear(nn.Module):
    """y = x A^T + b with A cut by its input features: the ranks' partial products are summed, b is added.

    Args:
        adds_bias: as in `ColumnParallelLinear`.
        std: of the initial weights.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        place: Placement,
        *,
        bias: bool,
        std: float,
        adds_bias: bool = True,
    ) -> None:
        super().__init__()
        self.product = row_product(place, arithmetic_of(place))
        weight = ParameterSpec((out_features, in_features), Shard("tp", 1), std=std)
        self.weight = new_parameter(weight, place)  # [out, in/t]
        self.bias = (
            new_parameter(ParameterSpec((out_features,), decay=False), place) if bias else None
        )  # [out], whole on every rank
        self.adds_bias = adds_bias

    def forward(self, x: Tensor) -> Tensor:
        """``[s, b, in/t]`` -> ``[s, b, out]``, or ``[s/t, b, out]`` if sequence parallel."""
        return self.product(x, self.weight, self.bias if self.adds_bias else None)


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


def arithmetic_of(place: Placement) -> Arithmetic:
    """What the linear layers compute with."""
    return PLAIN if place.fp8_format is None else Fp8Arithmetic(place.fp8_format, place.tp)


def depth_scaled_std(std: float, num_layers: int) -> float:
    """Initial std of the products that add to the residual stream: std / sqrt(2 L) (Radford et al. 2019)."""
    return std / math.sqrt(2.0 * num_layers)
