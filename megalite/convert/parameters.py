"""A model's parameters by name, without a model: shapes, padding, and how each is cut."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megalite.config import ModelConfig
from megalite.model.stage import GPTStage
from megalite.parallel.shard import ParameterSpec, spec_of
from megalite.topology import AXES, WORLD, Axis, Topology


def parameters_of(config: ModelConfig) -> dict[str, ParameterSpec]:
    """Every parameter of the whole model, as one rank would hold it, in the order of the layers.

    Args:
        config: found to be sound.

    Raises:
        UserError: the vocabulary's size is not known.
    """
    stage = GPTStage(config, _alone(), range(config.num_layers), seed=0, has_weights=False)
    return {name: spec_of(parameter) for name, parameter in stage.named_parameters()}


def _alone() -> Topology:
    """A world of one rank that communicates with nobody, so that no process group has to be started."""
    axes = {name: Axis(name, 1, 0, (0,), cast(dist.ProcessGroup, None)) for name in (*AXES, WORLD)}
    return Topology(rank=0, world_size=1, device=torch.device("meta"), mesh=cast(DeviceMesh, None), **axes)
