"""One rank, and parameters as the layers make them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from megalite.config import ParallelConfig
from megalite.distributed.rendezvous import Launch
from megalite.distributed.topology import Topology
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterSpec, new_parameter


@pytest.fixture
def topology() -> Iterator[Topology]:
    with Topology.start(ParallelConfig(distributed_backend="gloo").mesh, Launch(0, 1, 0, 1)) as topology:
        yield topology


@pytest.fixture
def make_parameter(topology: Topology):
    """Makes a parameter of random numbers, the same for the same shape."""

    def make(*shape: int, dtype: torch.dtype = torch.float64, **spec: bool) -> nn.Parameter:
        parameter = new_parameter(ParameterSpec(shape, **spec), LayerContext(topology, dtype))
        generator = torch.Generator().manual_seed(sum(shape))
        parameter.data.copy_(torch.randn(shape, generator=generator, dtype=dtype))
        return parameter

    return make
