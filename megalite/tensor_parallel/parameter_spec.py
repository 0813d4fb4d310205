"""Define the slice of each parameter that a rank holds: one plain slice of the full tensor along one dim."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from megalite.distributed.topology import Axis, Topology
from megalite.errors import UserError
from megalite.tensor_parallel.weight_gradient_store import WeightGradientStore


@dataclass(frozen=True)
class Shard:
    """Cuts the full tensor along `dim` into equal slices, one for each rank of the mesh axis `axis`."""

    axis: str
    dim: int


@dataclass(frozen=True)
class ParameterSpec:
    """Describes a parameter independently of the layout.

    Attributes:
        full_shape: shape of the full parameter over all ranks.
        shard: how it is cut; None if it is replicated on every rank.
        mean, std: mean and std of the normal distribution of its initial values (std 0: a constant).
        decay: whether weight decay applies; it does not apply to biases and norms.
        num_padding: number of unused indices at the end of dim 0; it depends on the layout.
        is_vocabulary: whether the rows are tokens: the word embedding's or the output layer's weight, which
            may have its own learning rate.
        initial: initial values, instead of mean and std, until the optimizer has read them.
    """

    full_shape: tuple[int, ...]
    shard: Shard | None = None
    mean: float = 0.0
    std: float = 0.0
    decay: bool = True
    num_padding: int = 0
    is_vocabulary: bool = False
    initial: Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def used_shape(self) -> tuple[int, ...]:
        """Return the full shape without padding: the same in every layout."""
        return (self.full_shape[0] - self.num_padding, *self.full_shape[1:])

    def local_shape(self, axis_size: int) -> tuple[int, ...]:
        """Return the shape of one slice for an axis of `axis_size` ranks.

        Raises:
            UserError: the dim is not divisible into equal slices.
        """
        if self.shard is None:
            return self.full_shape
        shape = list(self.full_shape)
        if shape[self.shard.dim] % axis_size != 0:
            raise UserError(
                f"a parameter of shape {self.full_shape} cannot be cut along dim {self.shard.dim} over "
                f"--{self.shard.axis} {axis_size}: choose model sizes that are divisible by it"
            )
        shape[self.shard.dim] //= axis_size
        return tuple(shape)


@dataclass(frozen=True)
class LayerContext:
    """Holds the settings that the modules of a model share on a rank, besides the model's config.

    Attributes:
        dtype: dtype of parameters and hidden states.
        seed: seed of initial weights and dropout.
        sequence_parallel: hidden states are cut over tp along the sequence, ``[s/tp, b, h]``, outside of
            attention and MLP (Korthikanti et al. 2022). The gradient of a replicated parameter is then a
            partial sum over the rank's positions, which the optimizer sums over tp.
        has_documents: samples are packed documents or end with padding, and attention stays within documents.
        weight_gradient_store: stores the linear layers' weight gradients if the schedule computes them later.
        fuses_weight_gradients: linear layers add their weight gradients to `weight.main_grad`.
        has_weights: False to make parameters on device meta, for a caller that replaces them.
        fp8_format: FP8 format of the linear layers' GEMMs; None for GEMMs in `dtype`.
    """

    topology: Topology
    dtype: torch.dtype
    seed: int = 0
    sequence_parallel: bool = False
    has_documents: bool = False
    weight_gradient_store: WeightGradientStore | None = None
    fuses_weight_gradients: bool = False
    has_weights: bool = True
    fp8_format: str | None = None

    @property
    def tp(self) -> Axis:
        return self.topology.tp

    @property
    def device(self) -> torch.device:
        return self.topology.device

    def first_position(self, num_positions: int) -> int:
        """Return the sample position of the first of this rank's `num_positions` hidden states."""
        return self.tp.rank * num_positions if self.sequence_parallel else 0


def new_parameter(spec: ParameterSpec, context: LayerContext) -> nn.Parameter:
    """Create this rank's uninitialized slice with its spec; `counter_random.initialize` fills it."""
    shape = spec.local_shape(context.tp.size if spec.shard else 1)
    device = context.device if context.has_weights else "meta"
    parameter = nn.Parameter(torch.empty(shape, dtype=context.dtype, device=device))
    parameter.spec = spec  # type: ignore[attr-defined]
    return parameter


def replicate_parameters(module: nn.Module, context: LayerContext) -> None:
    """Replicate parameters without a spec, from torch's own modules, on every rank; keep their values.

    Weight decay applies to parameters of two or more dims. Buffers are moved to the device.
    """
    specs: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if hasattr(parameter, "spec"):
                continue
            if parameter not in specs:
                values = parameter.detach()
                spec = ParameterSpec(tuple(values.shape), decay=values.dim() > 1, initial=values)
                specs[parameter] = new_parameter(spec, context)
                specs[parameter].requires_grad_(parameter.requires_grad)
            setattr(owner, name, specs[parameter])
        for name, buffer in list(owner.named_buffers(recurse=False)):
            setattr(owner, name, buffer.to(context.device))


def forget_initial_values(parameter: nn.Parameter) -> None:
    """Free the initial values that `replicate_parameters` kept."""
    parameter.spec = replace(spec_of(parameter), initial=None)  # type: ignore[attr-defined]


def spec_of(parameter: nn.Parameter) -> ParameterSpec:
    """Return the spec that `new_parameter` attached."""
    spec = parameter.spec  # type: ignore[attr-defined]
    assert isinstance(spec, ParameterSpec)
    return spec


def axis_of(spec: ParameterSpec, topology: Topology) -> Axis | None:
    """Return the mesh axis that a parameter is cut along, or None if it is replicated on every rank."""
    return None if spec.shard is None else getattr(topology, spec.shard.axis)


def num_used(spec: ParameterSpec, topology: Topology) -> int:
    """Return how many elements of this rank's flattened slice come before its padding."""
    axis = axis_of(spec, topology)
    num_rows, *row = spec.local_shape(1 if axis is None else axis.size)
    is_cut_by_rows = axis is not None and spec.shard is not None and spec.shard.dim == 0
    first_row = axis.rank * num_rows if axis is not None and is_cut_by_rows else 0
    return min(max(spec.used_shape[0] - first_row, 0), num_rows) * math.prod(row)


def gather_full(local: Tensor, spec: ParameterSpec, topology: Topology) -> Tensor:
    """All-gather the slices of a parameter, or of its gradient, into the full tensor; only for checks."""
    axis = axis_of(spec, topology)
    if axis is None or axis.size == 1 or spec.shard is None:
        return local.detach().clone()
    slices = [torch.empty_like(local) for _ in range(axis.size)]
    torch.distributed.all_gather(slices, local.detach().contiguous(), group=axis.group)
    return torch.cat(slices, dim=spec.shard.dim)
