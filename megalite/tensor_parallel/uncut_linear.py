"""A linear layer whose weight every tensor-parallel rank holds.

Shapes: s sequence, b microbatch, tp = tp.size, in and out features of a layer.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from megalite.tensor_parallel.gemm import WIDE
from megalite.tensor_parallel.gemm_collectives import SeparateCollectives
from megalite.tensor_parallel.linear import LinearContext, column_linear
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterSpec, new_parameter


class UncutLinear(nn.Module):
    """Linear layer y = x A^T + b for the tokens of a rank; its gradients are stored and added as others'.

    Args:
        bias: add a bias, which starts at zero.
        std, fused_rows: as in `ColumnParallelLinear`.
        maps_features: see `ParameterSpec`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        context: LayerContext,
        *,
        bias: bool = False,
        std: float = 0.02,
        fused_rows: tuple[int, ...] = (),
        maps_features: bool = True,
    ) -> None:
        super().__init__()
        self.context = _on_one_rank(context)
        shape = (out_features, in_features)
        spec = ParameterSpec(shape, std=std, fused_rows=fused_rows, maps_features=maps_features)
        self.weight = new_parameter(spec, context)  # [out, in]
        bias_spec = ParameterSpec((out_features,), decay=False)
        self.bias = new_parameter(bias_spec, context) if bias else None  # [out]

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[s, b, in]`` to ``[s, b, out]``, both ``[s/tp, b, ...]`` if sequence parallel."""
        return column_linear(x, self.weight, self.bias, self.context)


def _on_one_rank(context: LayerContext) -> LinearContext:
    """Return the context of a layer that each tensor-parallel rank computes without the others."""
    own = context.tp.ranks[context.tp.rank]
    tp, gemm = replace(context.tp, size=1, rank=0, ranks=(own,)), WIDE
    alone = SeparateCollectives(gemm, tp, False)
    store, fuses = context.weight_gradient_store, context.fuses_weight_gradients
    return LinearContext(tp, gemm, alone, alone, store, fuses)
