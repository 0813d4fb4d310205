"""The feed-forward block, cut over the tensor-parallel axis by its inner features.

Shapes: s sequence, b microbatch, h hidden size, ffn inner features, tp = tp.size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.kernels import bias_gelu, bias_swiglu
from megalite.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, depth_scaled_std
from megalite.tensor_parallel.parameter_shard import LayerContext

Activation = Callable[[Tensor, "Tensor | None"], Tensor]
"""Maps ``[..., n]`` and a bias that is still to be added to it, or None."""


def _of_sum(function: Callable[[Tensor], Tensor]) -> Activation:
    """Return an activation that adds the bias in a kernel of its own."""
    return lambda x, bias: function(x if bias is None else x + bias)


ACTIVATION_FUNCTIONS: dict[str, Activation] = {
    "gelu": bias_gelu,
    "gelu_exact": _of_sum(F.gelu),
    "relu": _of_sum(F.relu),
    "swiglu": bias_swiglu,
}
FUSES_BIAS = frozenset({"gelu", "swiglu"})
"""Activations whose kernel adds the bias; for the others the GEMM before them adds it at no cost."""


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
        fuses_bias = config.activation in FUSES_BIAS
        self.up = ColumnParallelLinear(h, up_shape, context, bias=bias, std=std, skip_bias_add=fuses_bias)
        down_std = depth_scaled_std(std, config.num_layers)
        self.down = RowParallelLinear(ffn, h, context, bias=bias, std=down_std, skip_bias_add=True)
        self.activation = ACTIVATION_FUNCTIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[s, b, h]`` to ``[s, b, h]``, both ``[s/tp, b, h]`` if sequence parallel."""
        return self.down(self.activate(self.up(x)))

    def activate(self, x: Tensor) -> Tensor:
        """Map `up`'s ``[s, b, ffn/tp]``, or ``[s, b, 2 ffn/tp]`` if gated, to ``[s, b, ffn/tp]``."""
        return self.activation(x, self.up.bias if self.up.skip_bias_add else None)
