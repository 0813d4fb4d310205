"""All mixers by their specs, and attention with Mamba-2 beside it.

Shapes: s sequence, b microbatch, h hidden size, tp = tp.size.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megalite.attention.core import StageCore
from megalite.attention.positions import PositionInfo
from megalite.config import AttentionSpec, ModelConfig, RecomputeConfig
from megalite.config.model.attention import LatentSpec
from megalite.config.model.layers import MixerSpec, ParallelMixersSpec
from megalite.config.model.recurrence import DeltaNetSpec, GatedConvolutionSpec, KimiDeltaSpec, MambaSpec
from megalite.data.batch.microbatch import BlockOutput, SampleNumbers
from megalite.model.attention import Attention, CachedLatentAttention, LatentAttention
from megalite.model.gated_convolution import GatedConvolution
from megalite.model.gated_delta_net import GatedDeltaNet
from megalite.model.kimi_delta_attention import KimiDeltaAttention
from megalite.model.mamba import Mamba
from megalite.model.mlp import multiply_output
from megalite.tensor_parallel.parameter_spec import LayerContext


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
