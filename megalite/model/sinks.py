"""The sinks of an attention module, by --softmax-type.

Shapes: n query heads, tp = tp.size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megalite.config import ModelConfig
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterSpec, new_parameter
from megalite.tensor_parallel.placement import Cut


def _none(config: ModelConfig, context: LayerContext) -> None:
    return None


def _zeros(config: ModelConfig, context: LayerContext) -> Tensor:
    """Return logits of 0, which add 1 to each sum (Miller 2023, "Attention is off by one")."""
    num_local = config.num_attention_heads // context.tp.size
    return torch.zeros(num_local, dtype=context.dtype, device=context.device)


def _learned(config: ModelConfig, context: LayerContext) -> Tensor:
    spec = ParameterSpec((config.num_attention_heads,), Cut("tp", 0), std=config.init_method_std, decay=False)
    return new_parameter(spec, context)


SINKS: Mapping[str, Callable[[ModelConfig, LayerContext], Tensor | None]] = {
    "vanilla": _none,
    "off-by-one": _zeros,
    "learnable": _learned,
}
"""Functions that build the sinks of this rank's query heads, ``[n/tp]``."""
