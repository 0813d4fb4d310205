"""The feed-forward block, cut over the tensor-parallel axis by its inner features."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.kernels import bias_gelu, bias_swiglu
from megalite.parallel.linear import ColumnParallelLinear, RowParallelLinear, depth_scaled_std
from megalite.parallel.recompute import compute_between, recompute_between
from megalite.parallel.shard import Placement

Activation = Callable[[Tensor, "Tensor | None"], Tensor]
"""Of ``[..., n]`` and the bias that is still to be added to it, if any."""


def after_bias(function: Callable[[Tensor], Tensor]) -> Activation:
    """An activation that is best given its input with the bias: products add one for nothing."""
    return lambda x, bias: function(x if bias is None else x + bias)


ACTIVATIONS: dict[str, Activation] = {
    "gelu": bias_gelu,
    "gelu_exact": after_bias(F.gelu),
    "relu": after_bias(F.relu),
    "swiglu": bias_swiglu,
}
ADD_BIAS = frozenset({"gelu", "swiglu"})
"""Activations that add the bias on their way."""
GATED = frozenset({"swiglu"})
"""Activations that take two halves."""


class MLP(nn.Module):
    """Down(activation(up(x))) without the last bias; a gated activation's halves stack as ``[2, ffn, h]``."""

    def __init__(
        self, config: ModelConfig, place: Placement, recomputed: Collection[str] = frozenset()
    ) -> None:
        super().__init__()
        ffn, bias, std = config.ffn_size, config.add_bias_linear, config.init_method_std
        halves = (2, ffn) if config.activation in GATED else (ffn,)
        adds_bias = config.activation not in ADD_BIAS
        self.up = ColumnParallelLinear(
            config.hidden_size, halves, place, bias=bias, std=std, adds_bias=adds_bias
        )
        self.down = RowParallelLinear(
            ffn,
            config.hidden_size,
            place,
            bias=bias,
            std=depth_scaled_std(std, config.num_layers),
            adds_bias=False,
        )
        self.activation = ACTIVATIONS[config.activation]
        self.between = recompute_between if "mlp_act" in recomputed else compute_between

    def forward(self, x: Tensor) -> Tensor:
        """``[s, b, h]`` -> ``[s, b, h]``, both ``[s/t, b, h]`` if sequence parallel."""
        return self.between(self._activate, self.up(x), self.down)

    def _activate(self, x: Tensor) -> Tensor:
        return self.activation(x, None if self.up.adds_bias else self.up.bias)
