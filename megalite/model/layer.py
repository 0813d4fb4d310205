"""One transformer layer, with norms before or after its blocks or both, or after the residual connections.

Shapes: s sequence, b microbatch, h hidden size, tp = tp.size.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from megalite.attention.core import StageCore
from megalite.attention.positions import PositionInfo
from megalite.config import LayerKind, ModelConfig
from megalite.loss_terms import SharedKeys, Terms, WithTerms
from megalite.microbatch import SampleNumbers
from megalite.model.experts import MixtureOfExperts, Router
from megalite.model.mixers import Mixer, build_mixer
from megalite.model.mlp import MLP
from megalite.model.norm import build_norm
from megalite.model.normed_experts import NormedExperts
from megalite.model.per_layer_embedding import EmbeddingGate
from megalite.tensor_parallel.counter_random import Dropout
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterSpec, new_parameter
from megalite.wrapping import wrap_point


class TransformerLayer(nn.Module):
    """Computes one pre-norm transformer layer (Radford et al. 2019).

    The forward of a layer also gets keys and values if it shares those of an earlier layer.

    Args:
        core: attention core, shared by all layers of a stage.
        layer: number of the layer in the whole model; it keys the layer's dropouts.

    Attributes:
        kind: the layer's kind, from the config.
    """

    def __init__(self, config: ModelConfig, context: LayerContext, core: StageCore, layer: int) -> None:
        super().__init__()
        self.kind = config.layer_kind(layer)
        config, context = config.for_kind(self.kind), context.of_layer(layer)
        is_pre_norm = config.norm_position in ("pre", "sandwich")
        if self.kind.mixer != "none":
            self.attention_norm = build_norm(config, context, with_residual=is_pre_norm)
            self.add_module(self.kind.mixer, build_mixer(config, context, core, layer, self.kind))
            self.attention_output_dropout = Dropout(
                config.hidden_dropout, context, f"layers.{layer}.attention.output"
            )
        if self.kind.has_mlp:
            self.mlp_norm = build_norm(config, context, with_residual=is_pre_norm)
            self.mlp = (
                MixtureOfExperts(config, context, Router(config, context, layer))
                if self.kind.has_experts and not config.moe_beside_mlp
                else MLP(config, context)
            )
            self.mlp_output_dropout = Dropout(config.hidden_dropout, context, f"layers.{layer}.mlp.output")
        self.output_scale = OutputScale(context) if config.layer_output_scale else nn.Identity()

    @property
    def mixer(self) -> Mixer:
        """Return the mixer, a submodule with the name of its kind, such as `attention`."""
        mixer: Mixer = getattr(self, self.kind.mixer)
        return mixer

    @wrap_point
    def forward(
        self, x: Tensor, sample_numbers: SampleNumbers, positions: PositionInfo, *keys: Tensor
    ) -> Tensor | WithTerms:
        """Map ``[s, b, h]`` to ``[s, b, h]``, both ``[s/tp, b, h]`` if sequence parallel."""
        # Each norm also returns x, so that its backward kernel adds the gradients of both uses of x.

        # x = x + dropout(mixer(norm(x)) + bias)
        normed, x = self.attention_norm(x)
        y, bias, _, shared = self.mixer(normed, sample_numbers, positions, *keys)
        total = self.attention_output_dropout.sum_for_norm(x, y, bias, sample_numbers)

        # x = x + dropout(mlp(norm(x)) + bias)
        normed, x = self.mlp_norm(total)  # on a GPU one kernel computes the sum and its norm
        y, bias, terms, _ = self.mlp(normed, sample_numbers, positions)
        return WithTerms.if_any(
            self.output_scale(self.mlp_output_dropout.add_to(x, y, bias, sample_numbers)), terms, shared
        )


class PostNormLayer(TransformerLayer):
    """Computes one post-norm transformer layer (Vaswani et al. 2017; Devlin et al. 2019)."""

    @wrap_point
    def forward(
        self, x: Tensor, sample_numbers: SampleNumbers, positions: PositionInfo, *keys: Tensor
    ) -> Tensor | WithTerms:
        """Map ``[s, b, h]`` to ``[s, b, h]``, both ``[s/tp, b, h]`` if sequence parallel."""
        # x = norm(x + dropout(mixer(x) + bias))
        y, bias, _, shared = self.mixer(x, sample_numbers, positions, *keys)
        x = self.attention_norm(self.attention_output_dropout.add_to(x, y, bias, sample_numbers))

        # x = norm(x + dropout(mlp(x) + bias))
        y, bias, terms, _ = self.mlp(x, sample_numbers, positions)
        normed: Tensor = self.mlp_norm(self.mlp_output_dropout.add_to(x, y, bias, sample_numbers))
        return WithTerms.if_any(self.output_scale(normed), terms, shared)


class OutputNormLayer(TransformerLayer):
    """Computes one layer whose norms are applied to the outputs of its blocks (OLMo 2: Walsh et al. 2025)."""

    @wrap_point
    def forward(
        self, x: Tensor, sample_numbers: SampleNumbers, positions: PositionInfo, *keys: Tensor
    ) -> Tensor | WithTerms:
        """Map ``[s, b, h]`` to ``[s, b, h]``, both ``[s/tp, b, h]`` if sequence parallel."""
        # x = x + dropout(norm(mixer(x) + bias))
        y, bias, _, shared = self.mixer(x, sample_numbers, positions, *keys)
        normed = self.attention_norm(y if bias is None else y + bias)
        x = self.attention_output_dropout.add_to(x, normed, None, sample_numbers)

        # x = x + dropout(norm(mlp(x) + bias))
        y, bias, terms, _ = self.mlp(x, sample_numbers, positions)
        normed = self.mlp_norm(y if bias is None else y + bias)
        return WithTerms.if_any(
            self.output_scale(self.mlp_output_dropout.add_to(x, normed, None, sample_numbers)), terms, shared
        )


class SandwichNormLayer(TransformerLayer):
    """Computes one layer with norms before and after its blocks (Ding et al. 2021; Gemma 2 and 3)."""

    def __init__(self, config: ModelConfig, context: LayerContext, core: StageCore, layer: int) -> None:
        super().__init__(config, context, core, layer)
        self.attention_output_norm = build_norm(config, context)
        self.mlp_output_norm = build_norm(config, context)

    @wrap_point
    def forward(
        self, x: Tensor, sample_numbers: SampleNumbers, positions: PositionInfo, *keys: Tensor
    ) -> Tensor | WithTerms:
        """Map ``[s, b, h]`` to ``[s, b, h]``, both ``[s/tp, b, h]`` if sequence parallel."""
        x, terms, shared = self.run_blocks(x, sample_numbers, positions, *keys)
        return WithTerms.if_any(self.output_scale(x), terms, shared)

    def run_blocks(
        self, x: Tensor, sample_numbers: SampleNumbers, positions: PositionInfo, *keys: Tensor
    ) -> tuple[Tensor, Terms, SharedKeys]:
        """Return x plus both blocks, ``[s, b, h]`` as in `forward`, and what these compute besides."""
        # x = x + dropout(norm(mixer(norm(x)) + bias))
        normed, x = self.attention_norm(x)
        y, bias, _, shared = self.mixer(normed, sample_numbers, positions, *keys)
        y = self.attention_output_norm(y if bias is None else y + bias)
        total = self.attention_output_dropout.sum_for_norm(x, y, None, sample_numbers)

        # x = x + dropout(norm(mlp(norm(x)) + bias))
        normed, x = self.mlp_norm(total)
        y, terms = self.feed_forward(x, normed, sample_numbers, positions)
        y = self.mlp_output_norm(y)
        return self.mlp_output_dropout.add_to(x, y, None, sample_numbers), terms, shared

    def feed_forward(
        self, x: Tensor, normed: Tensor, sample_numbers: SampleNumbers, positions: PositionInfo
    ) -> tuple[Tensor, Terms]:
        """Return mlp(normed) + bias, ``[s, b, h]``, of the residual stream x and its norm."""
        y, bias, terms, _ = self.mlp(normed, sample_numbers, positions)
        return y if bias is None else y + bias, terms


class ExpertsBesideMLPLayer(SandwichNormLayer):
    """Computes one layer with experts beside its MLP, whose outputs are normalized and added (Gemma 4)."""

    def __init__(self, config: ModelConfig, context: LayerContext, core: StageCore, layer: int) -> None:
        super().__init__(config, context, core, layer)
        self.mlp_own_norm = build_norm(config, context)
        self.experts = NormedExperts(config, context, layer)

    def feed_forward(
        self, x: Tensor, normed: Tensor, sample_numbers: SampleNumbers, positions: PositionInfo
    ) -> tuple[Tensor, Terms]:
        """Return norm(mlp(normed) + bias) + experts(x), ``[s, b, h]``, of the stream x and its norm."""
        of_mlp, _ = super().feed_forward(x, normed, sample_numbers, positions)
        of_experts, _, terms, _ = self.experts(x, sample_numbers, positions)
        return self.mlp_own_norm(of_mlp) + of_experts, terms


class OwnEmbeddingLayer(SandwichNormLayer):
    """Computes one layer that also adds an embedding of its own of each token (Gemma 4 E2B and E4B)."""

    def __init__(self, config: ModelConfig, context: LayerContext, core: StageCore, layer: int) -> None:
        super().__init__(config, context, core, layer)
        self.number = layer
        self.embedding_gate = EmbeddingGate(config, context)

    @wrap_point
    def forward(
        self, x: Tensor, sample_numbers: SampleNumbers, positions: PositionInfo, *tensors: Tensor
    ) -> Tensor | WithTerms:
        """Map ``[s, b, h]`` to ``[s, b, h]``, both ``[s/tp, b, h]`` if sequence parallel.

        Args:
            tensors: the layer's own embedding ``[s, b, e]``, and keys and values that it shares.
        """
        embedding, *keys = tensors
        x, terms, shared = self.run_blocks(x, sample_numbers, positions, *keys)
        return WithTerms.if_any(self.output_scale(x + self.embedding_gate(x, embedding)), terms, shared)


class OwnEmbeddingExpertsLayer(ExpertsBesideMLPLayer, OwnEmbeddingLayer):
    """Computes one layer with an embedding of its own, and with experts beside its MLP."""


class ParallelLayer(TransformerLayer):
    """Computes one layer whose blocks have the same input (Black et al. 2022)."""

    @wrap_point
    def forward(
        self, x: Tensor, sample_numbers: SampleNumbers, positions: PositionInfo, *keys: Tensor
    ) -> Tensor | WithTerms:
        """Map ``[s, b, h]`` to ``[s, b, h]``, both ``[s/tp, b, h]`` if sequence parallel."""
        # x = x + dropout(mixer(norm(x)) + bias) + dropout(mlp(norm(x)) + bias)
        of_attention, of_mlp, x = self.normed(x)
        y, bias, _, shared = self.mixer(of_attention, sample_numbers, positions, *keys)
        total = self.attention_output_dropout.add_to(x, y, bias, sample_numbers)
        y, bias, terms, _ = self.mlp(of_mlp, sample_numbers, positions)
        return WithTerms.if_any(
            self.output_scale(self.mlp_output_dropout.add_to(total, y, bias, sample_numbers)), terms, shared
        )

    def normed(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs of both blocks, and x, all ``[s, b, h]`` as in `forward`."""
        of_attention, x = self.attention_norm(x)
        of_mlp, x = self.mlp_norm(x)
        return of_attention, of_mlp, x


class SharedNormLayer(ParallelLayer):
    """Computes one layer whose blocks have the same input and one norm (GPT-J: Wang and Komatsuzaki 2021)."""

    def __init__(self, config: ModelConfig, context: LayerContext, core: StageCore, layer: int) -> None:
        super().__init__(config, context, core, layer)
        del self.mlp_norm

    def normed(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs of both blocks, which are one tensor, and x."""
        of_both, x = self.attention_norm(x)
        return of_both, of_both, x


class OutputScale(nn.Module):
    """Multiplies the hidden states after a layer by a learned number (Gemma 4)."""

    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        self.weight = new_parameter(ParameterSpec((1,), mean=1.0, decay=False), context)

    def forward(self, x: Tensor) -> Tensor:
        """Scale ``[s, b, h]``."""
        return x * self.weight


class MixerLayer(TransformerLayer):
    """Computes one layer that has a mixer and no MLP (Nemotron-H: NVIDIA 2025, arXiv 2504.03624)."""

    @wrap_point
    def forward(
        self, x: Tensor, sample_numbers: SampleNumbers, positions: PositionInfo, *keys: Tensor
    ) -> Tensor | WithTerms:
        """Map ``[s, b, h]`` to ``[s, b, h]``, both ``[s/tp, b, h]`` if sequence parallel."""
        # x = x + dropout(mixer(norm(x)) + bias)
        normed, x = self.attention_norm(x)
        y, bias, terms, shared = self.mixer(normed, sample_numbers, positions, *keys)
        x = self.output_scale(self.attention_output_dropout.add_to(x, y, bias, sample_numbers))
        return WithTerms.if_any(x, terms, shared)


class MLPLayer(TransformerLayer):
    """Computes one layer that has an MLP, or experts, and no mixer."""

    @wrap_point
    def forward(
        self, x: Tensor, sample_numbers: SampleNumbers, positions: PositionInfo, *keys: Tensor
    ) -> Tensor | WithTerms:
        """Map ``[s, b, h]`` to ``[s, b, h]``, both ``[s/tp, b, h]`` if sequence parallel."""
        # x = x + dropout(mlp(norm(x)) + bias)
        normed, x = self.mlp_norm(x)
        y, bias, terms, shared = self.mlp(normed, sample_numbers, positions)
        x = self.output_scale(self.mlp_output_dropout.add_to(x, y, bias, sample_numbers))
        return WithTerms.if_any(x, terms, shared)


LAYERS: Mapping[str, type[TransformerLayer]] = {
    "pre": TransformerLayer,
    "post": PostNormLayer,
    "output": OutputNormLayer,
    "sandwich": SandwichNormLayer,
}
"""Layer classes by the config's `norm_position`."""


def layer_class(config: ModelConfig, kind: LayerKind) -> type[TransformerLayer]:
    """Return the class of the config's layers of a kind."""
    if kind.mixer == "none":
        return MLPLayer
    if not kind.has_mlp:
        return MixerLayer
    if config.parallel_residual and config.norm_position == "pre":
        return SharedNormLayer if config.parallel_shared_norm else ParallelLayer
    has_own_embedding = config.hidden_size_per_layer_input is not None
    if kind.has_experts and config.moe_beside_mlp:
        return OwnEmbeddingExpertsLayer if has_own_embedding else ExpertsBesideMLPLayer
    return OwnEmbeddingLayer if has_own_embedding else LAYERS[config.norm_position]
