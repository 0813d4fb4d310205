"""One transformer layer: norm before each block, the blocks' outputs added to the residual stream."""

from __future__ import annotations

from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.model.attention import Attention, FusedCore, PlainCore
from megalite.model.mlp import MLP
from megalite.model.norm import build_norm
from megalite.parallel.rng import Dropout
from megalite.parallel.shard import Placement


class TransformerLayer(nn.Module):
    """x + drop(attention(norm(x))), then x + drop(mlp(norm(x)))."""

    def __init__(
        self, config: ModelConfig, place: Placement, core: FusedCore | PlainCore, layer: int, seed: int
    ) -> None:
        super().__init__()
        self.attention_norm = build_norm(config, place)
        self.attention = Attention(config, place, core, layer, seed)
        self.attention_dropout = Dropout(config.hidden_dropout, seed, f"layers.{layer}.attention.output")
        self.mlp_norm = build_norm(config, place)
        self.mlp = MLP(config, place)
        self.mlp_dropout = Dropout(config.hidden_dropout, seed, f"layers.{layer}.mlp.output")

    def forward(self, x: Tensor, sample_numbers: Tensor) -> Tensor:
        """``[s, b, h]`` -> ``[s, b, h]``."""
        y = self.attention(self.attention_norm(x), sample_numbers)
        x = x + self.attention_dropout(y, sample_numbers)
        y = self.mlp(self.mlp_norm(x))
        return x + self.mlp_dropout(y, sample_numbers)
