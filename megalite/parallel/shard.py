"""What a rank holds of a parameter: always one plain slice of the full tensor, along one dim."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megalite.parallel.weight_gradient_store import WeightGradientStore
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
        num_padding: indices at the end of dim 0 that mean nothing, as many as the layout needs.
    """

    full_shape: tuple[int, ...]
    shard: Shard | None = None
    mean: float = 0.0
    std: float = 0.0
    decay: bool = True
    num_padding: int = 0

    @property
    def used_shape(self) -> tuple[int, ...]:
        """The full shape without padding: the same in every layout."""
        return (self.full_shape[0] - self.num_padding, *self.full_shape[1:])

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
    """Where a layer's parameters are made, and as what.

    Attributes:
        sequence_parallel: hidden states are cut over tp by the sequence, ``[s/t, b, h]``, wherever no weight
            that is cut is at work (Korthikanti et al. 2022). A parameter that is whole on every rank then
            gets the gradient of its rank's positions alone, to be summed over tp.
        weight_gradient_store: takes the linear layers' weight gradients if the schedule computes them later.
        fuses_weight_gradients: linear layers add their weight gradients to `weight.main_grad`.
        has_weights: parameters have memory; else they have a shape alone (device meta), and somebody else
            puts others in their places.
        fp8_format: of the linear layers' products; None where they are in `dtype`.
    """

    tp: Axis
    dtype: torch.dtype
    device: torch.device
    sequence_parallel: bool = False
    weight_gradient_store: WeightGradientStore | None = None
    fuses_weight_gradients: bool = False
    has_weights: bool = True
    fp8_format: str | None = None

    def first_position(self, num_positions: int) -> int:
        """Position in the sample of the first of the `num_positions` that this rank's hidden states hold."""
        return self.tp.rank * num_positions if self.sequence_parallel else 0


def new_parameter(spec: ParameterSpec, place: Placement) -> nn.Parameter:
    """Makes this rank's slice, uninitialised (`parallel.rng.initialize` fills it), with its spec attached."""
    shape = spec.local_shape(place.tp.size if spec.shard else 1)
    device = place.device if place.has_weights else "meta"
    parameter = nn.Parameter(torch.empty(shape, dtype=place.dtype, device=device))
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


def num_used(spec: ParameterSpec, topology: Topology) -> int:
    """Return how many elements of this rank's flattened slice come before its padding."""
    axis = axis_of(spec, topology)
    num_rows, *row = spec.local_shape(1 if axis is None else axis.size)
    is_cut_by_rows = axis is not None and spec.shard is not None and spec.shard.dim == 0
    first_row = axis.rank * num_rows if axis is not None and is_cut_by_rows else 0
    return min(max(spec.used_shape[0] - first_row, 0), num_rows) * math.prod(row)


def gather_full(local: Tensor, spec: ParameterSpec, topology: Topology) -> Tensor:
    """Puts the slices of a parameter, or of its gradient, together on every rank: for checks alone."""
    axis = axis_of(spec, topology)
    if axis is None or axis.size == 1 or spec.shard is None:
        return local.detach().clone()
    slices = [torch.empty_like(local) for _ in range(axis.size)]
    torch.distributed.all_gather(slices, local.detach().contiguous(), group=axis.group)
    return torch.cat(slices, dim=spec.shard.dim)
