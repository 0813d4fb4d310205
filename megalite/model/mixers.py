"""The mixers of a layer: what lets a token see the tokens before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Protocol

from torch import Tensor, nn

from megalite.attention.core import StageCore
from megalite.attention.positions import PositionInfo
from megalite.config import LayerKind, ModelConfig
from megalite.microbatch import SampleNumbers
from megalite.model.gated_delta_net import GatedDeltaNet
from megalite.model.latent_attention import attention_class
from megalite.model.layer_state import BlockOutput
from megalite.model.mamba import Mamba
from megalite.tensor_parallel.parameter_spec import LayerContext


class Mixer(Protocol):
    """Declares the interface of a mixer, an `nn.Module`.

    Attributes:
        input_method: name of the wrap point that maps the layer's input to the arguments of the core; it
            takes one tensor that needs a gradient, the first of its arguments.
        core_method: name of the wrap point between the two projections, which --recompute-modules core_attn
            recomputes; of its arguments, the tensors of floating-point numbers are kept.
    """

    input_method: ClassVar[str]
    core_method: ClassVar[str]

    def __call__(
        self, x: Tensor, sample_numbers: SampleNumbers, positions: PositionInfo, *keys: Tensor
    ) -> BlockOutput: ...


def _attention(
    config: ModelConfig, context: LayerContext, core: StageCore, layer: int, kind: LayerKind
) -> nn.Module:
    return attention_class(config, is_cached=core.is_cached)(config, context, core, layer, kind)


MIXERS: Mapping[str, Callable[..., nn.Module]] = {
    "attention": _attention,
    "gated_delta_net": GatedDeltaNet,
    "mamba": Mamba,
}
"""Mixers by the `mixer` of a layer's kind, which is also the name of the layer's submodule."""


def build_mixer(
    config: ModelConfig, context: LayerContext, core: StageCore, layer: int, kind: LayerKind
) -> nn.Module:
    """Return the mixer of a layer.

    Args:
        core: attention core, shared by all layers of a stage; it also has the states of recurrent layers.
        layer: number of the layer in the whole model.
    """
    return MIXERS[kind.mixer](config, context, core, layer, kind)
