"""The feed-forward block, sharded along the tensor-parallel axis by its inner features.

Shapes: s sequence, b microbatch, h hidden size, ffn inner features, tp = tp.size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.kernels import bias_gelu, bias_swiglu
from megalite.tensor_parallel.linear import (
    Activated,
    ColumnParallelLinear,
    RowParallelLinear,
    depth_scaled_std,
)
from megalite.tensor_parallel.parameter_spec import LayerContext


class ActivationFunction(NamedTuple):
    """An activation, and whether its kernel adds the bias of the GEMM before it.

    Attributes:
        function: maps ``[..., n]``, and the bias ``[n]`` or None if `adds_bias`.
        adds_bias: otherwise the GEMM adds the bias, at no cost.
        is_gelu: some GPUs compute it, and its gradient, in the GEMMs before and after it.
    """

    function: Callable[..., Tensor]
    adds_bias: bool = False
    is_gelu: bool = False


ACTIVATION_FUNCTIONS = {
    "gelu": ActivationFunction(bias_gelu, adds_bias=True, is_gelu=True),
    "gelu_exact": ActivationFunction(F.gelu),
    "relu": ActivationFunction(F.relu),
    "swiglu": ActivationFunction(bias_swiglu, adds_bias=True),
}


class MLP(nn.Module):
    """Compute down(activation(up(x))) without the bias of `down`.

    The weight of `up` is ``[ffn/tp, h]``; a gated activation's halves are stacked, ``[2, ffn/tp, h]``.
    """

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__()
        h, ffn, bias, std = (
            config.hidden_size,
            config.ffn_size,
            config.add_bias_linear,
            config.init_method_std,
        )
        up_shape = (2, ffn) if config.is_gated else (ffn,)
        self.activation = ACTIVATION_FUNCTIONS[config.activation]
        self.up = ColumnParallelLinear(
            h,
            up_shape,
            context,
            bias=bias,
            std=std,
            skip_bias_add=self.activation.adds_bias,
            fuses_gelu=self.activation.is_gelu,
        )
        down_std = depth_scaled_std(std, config.num_layers)
        self.down = RowParallelLinear(ffn, h, context, bias=bias, std=down_std, skip_bias_add=True)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[s, b, h]`` to ``[s, b, h]``, both ``[s/tp, b, h]`` if sequence parallel."""
        return self.down(self.activate(self.up(x)))

    def activate(self, x: Tensor | Activated) -> Tensor | Activated:
        """Map `up`'s ``[s, b, ffn/tp]``, or ``[s, b, 2 ffn/tp]`` if gated, to ``[s, b, ffn/tp]``."""
        if isinstance(x, Activated):  # by the GEMM of `up`
            return x
        function, adds_bias, _ = self.activation
        return function(x, self.up.bias) if adds_bias else function(x)
