"""What a rank holds of a parameter: always one plain slice of the full tensor, along one dim."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megalite.topology import Axis, Topology


@dataclass(frozen=True)
class Shard:
    """The full tensor is cut along `dim` into equal slices, one for each rank of the mesh axis `axis`."""

    axis: str
    dim: int


@dataclass(frozen=True)
class ParameterSpec:
    """What is true of a parameter in every layout.

    Attributes:
        full_shape: shape of the whole parameter, over all ranks.
        shard: how it is cut; None where each rank of every axis holds all of it.
        mean, std: of the normal distribution that it starts from (std 0: a constant).
        decay: whether weight decay applies (not to biases and norms).
    """

    full_shape: tuple[int, ...]
    shard: Shard | None = None
    mean: float = 0.0
    std: float = 0.0
    decay: bool = True

    def local_shape(self, axis_size: int) -> tuple[int, ...]:
        """Shape of one slice when the shard's axis has `axis_size` ranks."""
        if self.shard is None:
            return self.full_shape
        shape = list(self.full_shape)
        assert shape[self.shard.dim] % axis_size == 0, (self, axis_size)
        shape[self.shard.dim] //= axis_size
        return tuple(shape)


@dataclass(frozen=True)
class Placement:
    """Where a layer's parameters are made, and as what."""

    tp: Axis
    dtype: torch.dtype
    device: torch.device


def new_parameter(spec: ParameterSpec, place: Placement) -> nn.Parameter:
    """Makes this rank's slice, uninitialised (`parallel.rng.initialize` fills it), with its spec attached."""
    shape = spec.local_shape(place.tp.size if spec.shard else 1)
    parameter = nn.Parameter(torch.empty(shape, dtype=place.dtype, device=place.device))
    parameter.spec = spec  # type: ignore[attr-defined]
    return parameter


def spec_of(parameter: nn.Parameter) -> ParameterSpec:
    """The spec that `new_parameter` attached."""
    spec = parameter.spec  # type: ignore[attr-defined]
    assert isinstance(spec, ParameterSpec)
    return spec


def axis_of(spec: ParameterSpec, topology: Topology) -> Axis | None:
    """The mesh axis that a parameter is cut along, None for one that is whole on every rank."""
    return None if spec.shard is None else getattr(topology, spec.shard.axis)


def gather_full(local: Tensor, spec: ParameterSpec, topology: Topology) -> Tensor:
    """Puts the slices of a parameter, or of its gradient, together on every rank: for checks alone."""
    axis = axis_of(spec, topology)
    if axis is None or axis.size == 1 or spec.shard is None:
        return local.detach().clone()
    slices = [torch.empty_like(local) for _ in range(axis.size)]
    torch.distributed.all_gather(slices, local.detach().contiguous(), group=axis.group)
    return torch.cat(slices, dim=spec.shard.dim)
