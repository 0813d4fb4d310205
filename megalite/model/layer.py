"""One transformer layer, with norms before or after the blocks or both, or after the residual connections.

Shapes: s sequence, b microbatch, h hidden size, tp = tp.size.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.loss_terms import WithTerms
from megalite.model.attention_core import Core
from megalite.model.experts import MixtureOfExperts
from megalite.model.latent_attention import attention_class
from megalite.model.mlp import MLP
from megalite.model.norm import build_norm
from megalite.model.positions import PositionInfo
from megalite.tensor_parallel.counter_random import Dropout
from megalite.tensor_parallel.parameter_spec import LayerContext
from megalite.wrapping import wrap_point


class TransformerLayer(nn.Module):
    """Computes one pre-norm transformer layer (Radford et al. 2019).

    Args:
        core: attention core, shared by all layers of a stage.
        layer: number of the layer in the whole model; it keys the layer's dropouts.

    Attributes:
        kind: the layer's kind, from the config.
    """

    def __init__(self, config: ModelConfig, context: LayerContext, core: Core, layer: int) -> None:
        super().__init__()
        self.kind = config.layer_kind(layer)
        is_pre_norm = config.norm_position in ("pre", "sandwich")
        self.attention_norm = build_norm(config, context, with_residual=is_pre_norm)
        attention = attention_class(config, is_cached=core.is_cached)
        self.attention = attention(config, context, core, layer, self.kind)
        self.attention_output_dropout = Dropout(
            config.hidden_dropout, context, f"layers.{layer}.attention.output"
        )
        self.mlp_norm = build_norm(config, context, with_residual=is_pre_norm)
        self.mlp = MixtureOfExperts(config, context) if self.kind.has_experts else MLP(config, context)
        self.mlp_output_dropout = Dropout(config.hidden_dropout, context, f"layers.{layer}.mlp.output")

    @wrap_point
    def forward(self, x: Tensor, sample_numbers: Tensor, positions: PositionInfo) -> Tensor | WithTerms:
        """Map ``[s, b, h]`` to ``[s, b, h]``, both ``[s/tp, b, h]`` if sequence parallel."""
        # Each norm also returns x, so that its backward kernel adds the gradients of both uses of x.

        # x = x + dropout(attention(norm(x)) + bias)
        normed, x = self.attention_norm(x)
        y, bias, _ = self.attention(normed, sample_numbers, positions)
        total = self.attention_output_dropout.sum_for_norm(x, y, bias, sample_numbers)

        # x = x + dropout(mlp(norm(x)) + bias)
        normed, x = self.mlp_norm(total)  # on a GPU one kernel computes the sum and its norm
        y, bias, terms = self.mlp(normed)
        return WithTerms.if_any(self.mlp_output_dropout.add_to(x, y, bias, sample_numbers), terms)


class PostNormLayer(TransformerLayer):
    """Computes one post-norm transformer layer (Vaswani et al. 2017; Devlin et al. 2019)."""

    @wrap_point
    def forward(self, x: Tensor, sample_numbers: Tensor, positions: PositionInfo) -> Tensor | WithTerms:
        """Map ``[s, b, h]`` to ``[s, b, h]``, both ``[s/tp, b, h]`` if sequence parallel."""
        # x = norm(x + dropout(attention(x) + bias))
        y, bias, _ = self.attention(x, sample_numbers, positions)
        x = self.attention_norm(self.attention_output_dropout.add_to(x, y, bias, sample_numbers))

        # x = norm(x + dropout(mlp(x) + bias))
        y, bias, terms = self.mlp(x)
        normed: Tensor = self.mlp_norm(self.mlp_output_dropout.add_to(x, y, bias, sample_numbers))
        return WithTerms.if_any(normed, terms)


class OutputNormLayer(TransformerLayer):
    """Computes one layer whose norms are applied to the outputs of its blocks (OLMo 2: Walsh et al. 2025)."""

    @wrap_point
    def forward(self, x: Tensor, sample_numbers: Tensor, positions: PositionInfo) -> Tensor | WithTerms:
        """Map ``[s, b, h]`` to ``[s, b, h]``, both ``[s/tp, b, h]`` if sequence parallel."""
        # x = x + dropout(norm(attention(x) + bias))
        y, bias, _ = self.attention(x, sample_numbers, positions)
        normed = self.attention_norm(y if bias is None else y + bias)
        x = self.attention_output_dropout.add_to(x, normed, None, sample_numbers)

        # x = x + dropout(norm(mlp(x) + bias))
        y, bias, terms = self.mlp(x)
        normed = self.mlp_norm(y if bias is None else y + bias)
        return WithTerms.if_any(self.mlp_output_dropout.add_to(x, normed, None, sample_numbers), terms)


class SandwichNormLayer(TransformerLayer):
    """Computes one layer with norms before and after its blocks (Ding et al. 2021; Gemma 2 and 3)."""

    def __init__(self, config: ModelConfig, context: LayerContext, core: Core, layer: int) -> None:
        super().__init__(config, context, core, layer)
        self.attention_output_norm = build_norm(config, context)
        self.mlp_output_norm = build_norm(config, context)

    @wrap_point
    def forward(self, x: Tensor, sample_numbers: Tensor, positions: PositionInfo) -> Tensor | WithTerms:
        """Map ``[s, b, h]`` to ``[s, b, h]``, both ``[s/tp, b, h]`` if sequence parallel."""
        # x = x + dropout(norm(attention(norm(x)) + bias))
        normed, x = self.attention_norm(x)
        y, bias, _ = self.attention(normed, sample_numbers, positions)
        y = self.attention_output_norm(y if bias is None else y + bias)
        total = self.attention_output_dropout.sum_for_norm(x, y, None, sample_numbers)

        # x = x + dropout(norm(mlp(norm(x)) + bias))
        normed, x = self.mlp_norm(total)
        y, bias, terms = self.mlp(normed)
        y = self.mlp_output_norm(y if bias is None else y + bias)
        return WithTerms.if_any(self.mlp_output_dropout.add_to(x, y, None, sample_numbers), terms)


class ParallelLayer(TransformerLayer):
    """Computes one layer whose blocks have the same input (Wang and Komatsuzaki 2021; Black et al. 2022)."""

    @wrap_point
    def forward(self, x: Tensor, sample_numbers: Tensor, positions: PositionInfo) -> Tensor | WithTerms:
        """Map ``[s, b, h]`` to ``[s, b, h]``, both ``[s/tp, b, h]`` if sequence parallel."""
        # x = x + dropout(attention(norm(x)) + bias) + dropout(mlp(norm(x)) + bias)
        of_attention, x = self.attention_norm(x)
        of_mlp, x = self.mlp_norm(x)
        y, bias, _ = self.attention(of_attention, sample_numbers, positions)
        total = self.attention_output_dropout.add_to(x, y, bias, sample_numbers)
        y, bias, terms = self.mlp(of_mlp)
        return WithTerms.if_any(self.mlp_output_dropout.add_to(total, y, bias, sample_numbers), terms)


LAYERS: Mapping[str, type[TransformerLayer]] = {
    "pre": TransformerLayer,
    "post": PostNormLayer,
    "output": OutputNormLayer,
    "sandwich": SandwichNormLayer,
}
"""Layer classes by the config's `norm_position`."""


def layer_class(config: ModelConfig) -> type[TransformerLayer]:
    """Return the class of the config's layers."""
    is_parallel = config.parallel_residual and config.norm_position == "pre"
    return ParallelLayer if is_parallel else LAYERS[config.norm_position]
