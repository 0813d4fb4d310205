"""The feed-forward block, cut over the tensor-parallel axis by its inner features."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.parallel.layers import ColumnParallelLinear, RowParallelLinear, depth_scaled_std
from megalite.parallel.recompute import compute_between, recompute_between
from megalite.parallel.shard import Placement


def swiglu(x: Tensor) -> Tensor:
    """``[..., 2 ffn]`` -> ``[..., ffn]``: SiLU of the first half gates the second (Shazeer 2020)."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": partial(F.gelu, approximate="tanh"),
    "gelu_exact": F.gelu,
    "relu": F.relu,
    "swiglu": swiglu,
}
GATED = frozenset({"swiglu"})
"""Activations that take two halves."""


class MLP(nn.Module):
    """Down(activation(up(x))); a gated activation's two halves stack as ``[2, ffn, h]``."""

    def __init__(
        self, config: ModelConfig, place: Placement, recomputed: Collection[str] = frozenset()
    ) -> None:
        super().__init__()
        ffn, bias, std = config.ffn_size, config.add_bias_linear, config.init_method_std
        halves = (2, ffn) if config.activation in GATED else (ffn,)
        self.up = ColumnParallelLinear(config.hidden_size, halves, place, bias=bias, std=std)
        self.down = RowParallelLinear(
            ffn, config.hidden_size, place, bias=bias, std=depth_scaled_std(std, config.num_layers)
        )
        self.activation = ACTIVATIONS[config.activation]
        self.between = recompute_between if "mlp_act" in recomputed else compute_between

    def forward(self, x: Tensor) -> Tensor:
        """``[s, b, h]`` -> ``[s, b, h]``, both ``[s/t, b, h]`` if sequence parallel."""
        return self.between(self.activation, self.up(x), self.down)
