"""The mixers of a layer: what lets a token see the tokens before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn

from megalite.attention.core import StageCore
from megalite.attention.positions import PositionInfo
from megalite.batch.microbatch import SampleNumbers
from megalite.config import AttentionSpec, ModelConfig, RecomputeConfig
from megalite.config.model.attention import LatentSpec
from megalite.config.model.layers import MixerSpec
from megalite.config.model.recurrence import DeltaNetSpec, MambaSpec
from megalite.model.attention import Attention
from megalite.model.gated_delta_net import GatedDeltaNet
from megalite.model.latent_attention import CachedLatentAttention, LatentAttention
from megalite.model.layer_state import BlockOutput
from megalite.model.mamba import Mamba
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


_MIXERS: Mapping[type[MixerSpec], type[nn.Module]] = {
    AttentionSpec: Attention,
    LatentSpec: LatentAttention,
    DeltaNetSpec: GatedDeltaNet,
    MambaSpec: Mamba,
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
