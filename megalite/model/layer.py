"""One transformer layer: a mixer and an MLP, whose outputs are added to the hidden states.

The mixers by their specs, attention with Mamba-2 beside it, and experts beside an MLP belong to it.

Shapes: s sequence, b microbatch, h hidden size, e experts, k experts of a token, tp = tp.size. In
`TransformerLayer`, e is the size of the layer's own embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.attention.core import StageCore
from megalite.attention.positions import PositionInfo
from megalite.config import AttentionSpec, ModelConfig, RecomputeConfig
from megalite.config.model.attention import LatentSpec
from megalite.config.model.layers import MixerSpec, ParallelMixersSpec
from megalite.config.model.recurrence import DeltaNetSpec, GatedConvolutionSpec, KimiDeltaSpec, MambaSpec
from megalite.config.model.transformer import NORMALIZED
from megalite.data.microbatch import (
    BlockOutput,
    LayerState,
    SampleNumbers,
    SharedKeys,
    Terms,
    WithTerms,
)
from megalite.kernels import ResidualSum
from megalite.model.attention import Attention, CachedLatentAttention, LatentAttention
from megalite.model.embedding import EmbeddingGate
from megalite.model.experts import MixtureOfExperts, Router, Routing
from megalite.model.gated_delta_net import GatedDeltaNet, KimiDeltaAttention
from megalite.model.mamba import Mamba
from megalite.model.mlp import MLP, multiply_output
from megalite.model.norm import HeadRMSNorm, build_norm
from megalite.model.recompute_region import recompute_first
from megalite.model.recurrent_mixer import GatedConvolution
from megalite.tensor_parallel.counter_random import Dropout
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterSpec, new_parameter
from megalite.utils.wrapping import eager_point, wrap, wrap_point


class Mixer(Protocol):
    """Interface of a mixer, an `nn.Module`."""

    def __call__(
        self, x: Tensor, sample_numbers: SampleNumbers, positions: PositionInfo, *keys: Tensor
    ) -> BlockOutput: ...

    def recompute_parts(self, config: RecomputeConfig, norm: nn.Module) -> None:
        """Let backward recompute the parts that the config names.

        Args:
            norm: norm of the mixer's input.
        """


class ParallelMixers(nn.Module):
    """Computes m attention(x) + n mamba(x), where m and n are --mixer-multipliers (Falcon-H1)."""

    attention: Any
    mamba: Any

    def __init__(
        self,
        config: ModelConfig,
        context: LayerContext,
        core: StageCore,
        layer: int,
        spec: ParallelMixersSpec,
    ) -> None:
        super().__init__()
        self.attention = build_mixer(config, context, core, layer, spec.attention)
        self.mamba = build_mixer(config, context, core, layer, spec.mamba)
        self.factors = config.mixer_multipliers or (1.0, 1.0)

    def recompute_parts(self, config: RecomputeConfig, norm: nn.Module) -> None:
        """Let backward recompute the parts of both mixers that the config names."""
        for mixer in (self.attention, self.mamba):
            mixer.recompute_parts(config, norm)

    def forward(
        self, x: Tensor, sample_numbers: SampleNumbers, positions: PositionInfo, *keys: Tensor
    ) -> BlockOutput:
        """Map ``[s, b, h]`` to ``[s, b, h]``, both ``[s/tp, b, h]`` if sequence parallel."""
        first = self.attention(x, sample_numbers, positions, *keys)
        second = self.mamba(x, sample_numbers, positions)
        outputs = zip(self.factors, (first, second), strict=True)
        (y, bias), (other, other_bias) = (multiply_output(factor, y.x, y.bias) for factor, y in outputs)
        biases = [each for each in (bias, other_bias) if each is not None]
        return BlockOutput(y + other, reduce(torch.add, biases) if biases else None, keys=first.keys)


_MIXERS: Mapping[type[MixerSpec], type[nn.Module]] = {
    AttentionSpec: Attention,
    LatentSpec: LatentAttention,
    DeltaNetSpec: GatedDeltaNet,
    KimiDeltaSpec: KimiDeltaAttention,
    GatedConvolutionSpec: GatedConvolution,
    MambaSpec: Mamba,
    ParallelMixersSpec: ParallelMixers,
}


def build_mixer(
    config: ModelConfig, context: LayerContext, core: StageCore, layer: int, spec: MixerSpec
) -> nn.Module:
    """Return the mixer of a layer.

    Args:
        core: attention core, shared by all layers of a stage; it also has the states of recurrent layers.
        layer: number of the layer in the whole model.
    """
    is_latent_cached = core.is_cached and isinstance(spec, LatentSpec)
    build = CachedLatentAttention if is_latent_cached else _MIXERS[type(spec)]
    return build(config, context, core, layer, spec)


class TransformerLayer(nn.Module):
    """Adds the outputs of its blocks, a mixer and an MLP, to the hidden states.

    A block f maps the hidden states x to

        pre         x + dropout(f(norm(x)) + bias)          Radford et al. 2019
        output      x + dropout(norm(f(x) + bias))          OLMo 2: Walsh et al. 2025
        sandwich    x + dropout(norm(f(norm(x)) + bias))    Ding et al. 2021; Gemma 2 and 3
        post        norm(x + dropout(f(x) + bias))          Vaswani et al. 2017; Devlin et al. 2019

    by its spec's `norm_position`; --residual-multiplier multiplies what is added to x. The MLP follows the
    mixer, or reads the same x (--parallel-residual: Black et al. 2022). A layer may have one block alone
    (Nemotron-H: NVIDIA 2025, arXiv 2504.03624), experts in the place of the MLP or beside it, and an
    embedding of its own, which it adds at its end (Gemma 4 E2B).

    Args:
        core: attention core, shared by all layers of a stage.
        layer: number of the layer in the whole model; it keys the layer's dropouts.

    Attributes:
        spec: the layer's blocks, from the config.
        blocks: names of the blocks, with which the names of their norms and dropouts begin.
        normalized: what is normalized around each block.
        is_parallel: whether all blocks read the layer's input.
    """

    attention_norm: nn.Module
    mlp_norm: nn.Module

    def __init__(self, config: ModelConfig, context: LayerContext, core: StageCore, layer: int) -> None:
        super().__init__()
        self.number, self.spec = layer, config.layer_spec(layer)
        spec, context = self.spec, context.for_layer(layer)
        has_mixer, has_mlp = spec.mixer is not None, spec.has_mlp
        self.reads = () if spec.attention is None else spec.attention.reads
        self.blocks = [name for name, is_there in (("attention", has_mixer), ("mlp", has_mlp)) if is_there]
        self.normalized = NORMALIZED[spec.norm_position]
        self.is_parallel = config.parallel_residual and has_mixer and has_mlp
        self.shares_norm = self.is_parallel and config.parallel_shared_norm
        if spec.mixer is not None:
            self._add_norms("attention", config, context)
            self.add_module(spec.mixer.name, build_mixer(config, context, core, layer, spec.mixer))
            self.attention_output_dropout = Dropout(
                config.hidden_dropout, context, f"layers.{layer}.attention.output"
            )
        if has_mlp:
            self._add_norms("mlp", config, context)
            self.mlp = (
                MixtureOfExperts(config, context, Router(config, context, layer))
                if spec.ffn_size is None
                else MLP(config, context, spec.ffn_size)
            )
            self.mlp_output_dropout = Dropout(config.hidden_dropout, context, f"layers.{layer}.mlp.output")
        self.experts: NormedExperts | None = None
        self.embedding_gate: EmbeddingGate | None = None
        if spec.experts is not None and spec.ffn_size is not None:  # experts beside the MLP
            self.mlp_own_norm = build_norm(config, context)
            self.experts = NormedExperts(config, context, layer)
        if config.hidden_size_per_layer_input is not None and has_mixer and has_mlp:
            self.embedding_gate = EmbeddingGate(config, context)
        self.residual_multiplier = config.residual_multiplier
        self.output_scale = OutputScale(context) if config.layer_output_scale else nn.Identity()

    def _add_norms(self, block: str, config: ModelConfig, context: LayerContext) -> None:
        if not (block == "mlp" and self.shares_norm):
            norm = build_norm(config, context, with_residual="input" in self.normalized)
            self.add_module(f"{block}_norm", norm)
        if len(self.normalized) > 1:
            self.add_module(f"{block}_output_norm", build_norm(config, context))

    @property
    def mixer(self) -> Mixer:
        """Return the mixer, a submodule with the name of its spec, such as `attention`."""
        assert self.spec.mixer is not None
        mixer: Mixer = getattr(self, self.spec.mixer.name)
        return mixer

    def recompute_parts(self, config: RecomputeConfig) -> None:
        """Let backward recompute the parts of the blocks that the config names."""
        if self.spec.mixer is not None:
            self.mixer.recompute_parts(config, self.attention_norm)
        if self.spec.has_mlp:
            norm = self.attention_norm if self.shares_norm else self.mlp_norm
            self.mlp.recompute_parts(config, norm)
            if self.experts is not None:
                self.experts.recompute_parts(config, norm)

    def own_inputs(self, state: LayerState) -> tuple[Tensor, ...]:
        """Return the arguments of `forward` that only some layers have, from the layers before it."""
        embedding = () if self.embedding_gate is None else (state.embeddings[self.number],)
        return *embedding, *(x for number in self.reads for x in state.keys[number])

    @wrap_point
    def forward(
        self, x: Tensor, sample_numbers: SampleNumbers, positions: PositionInfo, *own: Tensor
    ) -> Tensor | WithTerms:
        """Map ``[s, b, h]`` to ``[s, b, h]``, both ``[s/tp, b, h]`` if sequence parallel.

        Args:
            own: the layer's own embedding ``[s, b, e]``, if it has one, and what it reads of earlier layers.
        """
        read = own if self.embedding_gate is None else own[1:]
        total: Tensor | ResidualSum = x
        terms: Terms = {}
        shared: SharedKeys = {}
        # Not a loop: torch.compile cannot leave a graph in a loop, as it does for experts. The MLP's tensors
        # have the names of the mixer's, so that nothing of the mixer outlives it.
        if "attention" in self.blocks:
            normed, total = self._input_of("attention", total)
            if self.is_parallel:
                mlp_input, total = (normed, total) if self.shares_norm else self._input_of("mlp", total)
            output = self.mixer(normed, sample_numbers, positions, *read)
            total, shared = self._sum("attention", total, output, sample_numbers), output.keys
        if "mlp" in self.blocks:
            if self.is_parallel:
                normed = mlp_input
            else:
                normed, total = self._input_of("mlp", total)
            assert isinstance(total, Tensor)
            output = self._feed_forward(total, normed, sample_numbers, positions)
            total, terms = self._sum("mlp", total, output, sample_numbers), output.terms
        if self.embedding_gate is not None:
            total = total + self.embedding_gate(total, own[0])
        return WithTerms.if_any(self.output_scale(total), terms, shared)

    def _input_of(self, block: str, x: Tensor | ResidualSum) -> tuple[Tensor, Tensor]:
        """Return the input of a block, and x for the sum.

        The norm returns x too, so that its backward kernel adds the gradients of both uses of x. If x is a
        sum that is not yet computed, one kernel on a GPU computes the sum and its norm.
        """
        if "input" not in self.normalized:
            assert isinstance(x, Tensor)
            return x, x
        normed: tuple[Tensor, Tensor] = getattr(self, f"{block}_norm")(x)
        return normed

    def _feed_forward(
        self, x: Tensor, normed: Tensor, sample_numbers: SampleNumbers, positions: PositionInfo
    ) -> BlockOutput:
        """Return the output of the MLP, or norm(mlp(normed) + bias) + experts(x) (Gemma 4)."""
        output: BlockOutput = self.mlp(normed, sample_numbers, positions)
        if self.experts is None:
            return output
        y = output.x if output.bias is None else output.x + output.bias
        experts: BlockOutput = self.experts(x, sample_numbers, positions)
        return BlockOutput(self.mlp_own_norm(y) + experts.x, None, experts.terms)

    def _sum(
        self, block: str, x: Tensor, output: BlockOutput, sample_numbers: SampleNumbers
    ) -> Tensor | ResidualSum:
        """Return x plus a block's output, or the operands of this sum for the norm of the next block."""
        y, bias = output.x, output.bias
        if "output" in self.normalized:
            norm = f"{block}_output_norm" if "input" in self.normalized else f"{block}_norm"
            y, bias = getattr(self, norm)(y if bias is None else y + bias), None
        y, bias = multiply_output(self.residual_multiplier, y, bias)
        dropout: Dropout = getattr(self, f"{block}_output_dropout")
        is_normed_next = "input" in self.normalized and not self.is_parallel and block != self.blocks[-1]
        if is_normed_next:
            return dropout.sum_for_norm(x, y, bias, sample_numbers)
        total = dropout.add_to(x, y, bias, sample_numbers)
        return getattr(self, f"{block}_norm")(total) if "sum" in self.normalized else total


class OutputScale(nn.Module):
    """Multiplies the hidden states after a layer by a learned number (Gemma 4)."""

    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        self.weight = new_parameter(ParameterSpec((1,), mean=1.0, decay=False), context)

    def forward(self, x: Tensor) -> Tensor:
        """Scale ``[s, b, h]``."""
        return x * self.weight


class NormedRouter(Router):
    """Normalizes and scales its input, and scales the weights of experts by a learned number for each.

    Attributes:
        scale: ``[h]``, factors of the normalized input, besides 1 / sqrt(h).
        expert_scale: ``[e]``.
    """

    def __init__(self, config: ModelConfig, context: LayerContext, layer: int = 0) -> None:
        super().__init__(config, context, layer)
        self.norm = HeadRMSNorm(config.norm_epsilon)
        self.scale = new_parameter(ParameterSpec((config.hidden_size,), mean=1.0, decay=False), context)
        self.expert_scale = new_parameter(ParameterSpec((self.num_experts,), mean=1.0, decay=False), context)

    def forward(
        self, x: Tensor, sample_numbers: SampleNumbers | None = None, is_real: Tensor | None = None
    ) -> Routing:
        """Route the rank's tokens ``[s, b, h]``, ``[s/tp, b, h]`` if sequence parallel."""
        routing = super().forward(self.norm(x) * self.scale * x.shape[-1] ** -0.5, sample_numbers, is_real)
        experts = routing.experts.clamp_max(self.num_experts - 1)  # e is not an expert: it drops the token
        scales = F.embedding(experts, self.expert_scale.unsqueeze(1)).squeeze(-1)  # [s, b, k]
        return routing._replace(weights=routing.weights * scales)


class NormedExperts(MixtureOfExperts):
    """Computes norm(experts(norm(x))), with a router that reads x itself."""

    def __init__(self, config: ModelConfig, context: LayerContext, layer: int) -> None:
        super().__init__(config, context, NormedRouter(config, context, layer))
        self.input_norm = build_norm(config, context)
        self.output_norm = build_norm(config, context)

    def recompute_parts(self, config: RecomputeConfig, norm: nn.Module) -> None:
        """Let backward recompute the experts; their norms are a part of them."""
        if "mlp" in config.modules:
            wrap(self, "transform", recompute_first)

    @eager_point
    def transform(
        self, x: Tensor, sample_numbers: SampleNumbers | None = None, is_real: Tensor | None = None
    ) -> tuple[Tensor, Terms]:
        """Compute `forward`."""
        y, terms = self.compute_experts(self.input_norm(x), self.router(x, sample_numbers, is_real))
        return self.output_norm(y), terms
