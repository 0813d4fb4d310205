"""One transformer layer, with norms before the blocks or after the residual connections.

Shapes: s sequence, b microbatch, h hidden size, tp = tp.size.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.model.attention import Attention
from megalite.model.attention_core import Core
from megalite.model.mlp import MLP
from megalite.model.norm import build_norm
from megalite.model.positions import PositionInfo
from megalite.tensor_parallel.counter_random import Dropout
from megalite.tensor_parallel.parameter_spec import LayerContext


class TransformerLayer(nn.Module):
    """Computes one pre-norm transformer layer (Radford et al. 2019).

    Args:
        core: attention core, shared by all layers of a stage.
        layer: number of the layer in the whole model; it keys the layer's dropouts.
    """

    def __init__(self, config: ModelConfig, context: LayerContext, core: Core, layer: int) -> None:
        super().__init__()
        is_pre_norm = config.norm_position == "pre"
        self.attention_norm = build_norm(config, context, with_residual=is_pre_norm)
        self.attention = Attention(config, context, core, layer)
        self.attention_output_dropout = Dropout(
            config.hidden_dropout, context, f"layers.{layer}.attention.output"
        )
        self.mlp_norm = build_norm(config, context, with_residual=is_pre_norm)
        self.mlp = MLP(config, context)
        self.mlp_output_dropout = Dropout(config.hidden_dropout, context, f"layers.{layer}.mlp.output")

    def forward(self, x: Tensor, sample_numbers: Tensor, positions: PositionInfo) -> Tensor:
        """Map ``[s, b, h]`` to ``[s, b, h]``, both ``[s/tp, b, h]`` if sequence parallel."""
        # Each norm also returns x, so that its backward kernel adds the gradients of both uses of x.

        # x = x + dropout(attention(norm(x)) + bias)
        normed, x = self.attention_norm(x)
        y = self.attention(normed, sample_numbers, positions)
        total = self.attention_output_dropout.sum_for_norm(
            x, y, self.attention.projection.bias, sample_numbers
        )

        # x = x + dropout(mlp(norm(x)) + bias)
        normed, x = self.mlp_norm(total)  # on a GPU one kernel computes the sum and its norm
        y = self.mlp(normed)
        return self.mlp_output_dropout.add_to(x, y, self.mlp.down.bias, sample_numbers)


class PostNormLayer(TransformerLayer):
    """Computes one post-norm transformer layer (Vaswani et al. 2017; Devlin et al. 2019)."""

    def forward(self, x: Tensor, sample_numbers: Tensor, positions: PositionInfo) -> Tensor:
        """Map ``[s, b, h]`` to ``[s, b, h]``, both ``[s/tp, b, h]`` if sequence parallel."""
        # x = norm(x + dropout(attention(x) + bias))
        y = self.attention(x, sample_numbers, positions)
        x = self.attention_norm(
            self.attention_output_dropout.add_to(x, y, self.attention.projection.bias, sample_numbers)
        )

        # x = norm(x + dropout(mlp(x) + bias))
        y = self.mlp(x)
        normed: Tensor = self.mlp_norm(
            self.mlp_output_dropout.add_to(x, y, self.mlp.down.bias, sample_numbers)
        )
        return normed


LAYERS: Mapping[str, type[TransformerLayer]] = {"pre": TransformerLayer, "post": PostNormLayer}
"""Layer classes by the config's `norm_position`."""
