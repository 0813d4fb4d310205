"""Stages of a model, for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from megalite.attention.choice import build_core
from megalite.attention.core import StageCore
from megalite.config import ModelConfig, RecomputeConfig
from megalite.distributed.topology import Topology
from megalite.model.activation_offload import ActivationOffload, apply_offload
from megalite.model.bert_stage import STAGES
from megalite.model.recompute import apply_recompute
from megalite.model.stage import DTYPES
from megalite.tensor_parallel.parameter_spec import LayerContext


def build_stage(
    model: ModelConfig,
    topology: Topology,
    layers: Iterable[int],
    *,
    recompute: RecomputeConfig | None = None,
    offload: ActivationOffload | None = None,
    attention: Callable[[ModelConfig, LayerContext], StageCore] = build_core,
    **context: Any,
) -> Any:
    """Return this rank's stage: the first and last rank of pp have the first and last stage.

    Args:
        context: fields of `LayerContext`.
    """
    stage = STAGES[model.architecture](
        model,
        LayerContext(topology, DTYPES[model.params_dtype], **context),
        layers,
        is_first=topology.pp.is_first,
        is_last=topology.pp.is_last,
        attention=attention,
    )
    if recompute is not None:
        apply_recompute(stage, recompute)
        if offload is not None:
            apply_offload(stage, recompute.cpu_offload_activations, offload)
    return stage
