"""Describe parameters and buffers independently of the layout, and make the boxes that a rank holds."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.config.parallel import (
    CP_COMM_PROPERTIES,
    CpCommProperties,
    CpCommType,
    CpCommTypes,
    comm_type_of_layer,
)
from megalite.data.microbatch import AssignedSamples, SampleNumbers
from megalite.distributed.axes import CONTEXT, EXPERTS, Slice
from megalite.distributed.axis import Axis, AxisSet, cut_ranges, range_positions
from megalite.distributed.collectives import OverlapSlots
from megalite.distributed.topology import Topology
from megalite.tensor_parallel.fp8 import Fp8Settings
from megalite.tensor_parallel.gemm import WeightGradientStore
from megalite.tensor_parallel.gemm_collectives import SEPARATE, Overlap
from megalite.tensor_parallel.placement import Box, Cut, ParameterAxes
from megalite.utils.errors import UserError


@dataclass(frozen=True)
class ParameterSpec:
    """Properties of a parameter that do not depend on the layout.

    Attributes:
        full_shape: shape of the full parameter over all ranks.
        cut: how it is cut: one cut, several, or None if it is replicated on every rank. Of several along one
            dim, the first is the outermost.
        mean, std: mean and std of the normal distribution of its initial values (std 0: a constant), without
            muP.
        decay: whether weight decay applies; it does not apply to biases and norms.
        num_padding: number of unused indices at the end of dim 0; it depends on the layout.
        is_vocabulary: whether the rows are tokens: the word embedding's or the output layer's weight, which
            may have its own learning rate.
        maps_features: whether a weight of two or more dims maps features to features. Embeddings do not, and
            neither do output layers. See `is_matrix`.
        fused_rows: numbers of consecutive rows (of the last dim but one) of several matrices that are fused
            into one weight. They repeat until the last row: a QKV weight has them for each key/value head.
        width_ratio: in muP, how many times more inputs a matrix has than in the base model. It divides the
            variance of the initial values and AdamW's learning rate.
        initial: initial values in the full shape, instead of mean and std, until the optimizer has read them.
        dtype: dtype of a buffer; None for a parameter, which has the model's.
        partial_over: names of axes over which a rank's gradient is a partial sum even if its samples are
            complete. None for the axes along which the context cuts the sequence, except for those that cut
            or replicate the parameter; `new_parameter` replaces it by their names.
    """

    full_shape: tuple[int, ...]
    cut: Cut | tuple[Cut, ...] | None = None
    mean: float = 0.0
    std: float = 0.0
    decay: bool = True
    num_padding: int = 0
    is_vocabulary: bool = False
    maps_features: bool = True
    fused_rows: tuple[int, ...] = ()
    width_ratio: float = 1.0
    initial: Tensor | None = field(default=None, compare=False, repr=False)
    partial_over: tuple[str, ...] | None = None
    dtype: torch.dtype | None = None

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """Return all cuts."""
        if self.cut is None:
            return ()
        return self.cut if isinstance(self.cut, tuple) else (self.cut,)

    @property
    def used_shape(self) -> tuple[int, ...]:
        """Return the full shape without padding: the same in every layout."""
        return (*(rows - self.num_padding for rows in self.full_shape[:1]), *self.full_shape[1:])

    @property
    def initial_std(self) -> float:
        """Return the std of the initial values, scaled by muP."""
        return self.std / math.sqrt(self.width_ratio)

    @property
    def is_matrix(self) -> bool:
        """Return whether it is a matrix, or several of equal shape along the leading dims."""
        return self.maps_features and self.decay and not self.is_vocabulary and len(self.full_shape) > 1

    @property
    def parameter_axes(self) -> ParameterAxes:
        """Return which ranks hold it."""
        cut_over = {cut.axis for cut in self.cuts}
        return ParameterAxes(tuple(sorted(cut_over)), tuple(sorted(set(self.partial_over or ()))))

    def box(self, topology: Topology, coordinates: Mapping[str, int] | None = None) -> Box:
        """Return the box of the full tensor that this rank holds.

        Args:
            coordinates: coordinates along the axes that cut it, for the box of another rank.

        Raises:
            UserError: a dim is not divisible into equal slices, or an axis cannot cut a parameter.
        """
        axes = self.parameter_axes.axes(topology).axes
        starts, shape = [0] * len(self.full_shape), list(self.full_shape)
        for cut in self.cuts:
            axis = axes[cut.axis]
            if shape[cut.dim] % axis.size != 0:
                raise UserError(
                    f"a parameter of shape {self.full_shape} cannot be cut along dim {cut.dim} over "
                    f"--{cut.axis} {axis.size}: choose model sizes that are divisible by it"
                )
            shape[cut.dim] //= axis.size
            rank = axis.rank if coordinates is None else coordinates[cut.axis]
            starts[cut.dim] += rank * shape[cut.dim]
        return Box(tuple(starts), tuple(shape))

    def dim_cut_over(self, axis: str) -> int | None:
        """Return the dim that an axis cuts; None if it does not cut the parameter."""
        return next((cut.dim for cut in self.cuts if cut.axis == axis), None)


@dataclass(frozen=True)
class ParameterShard:
    """Elements ``[start, start + n)`` of this rank's flattened slice of a parameter, state or buffer.

    Attributes:
        tensor: these elements, ``[n]``; n may be 0.
        start: position of the first element in the slice.
        is_replicated: whether every data-parallel rank has these elements; otherwise the other ranks that
            ZeRO shards over have the rest.
        is_buffer: whether it is a module's buffer, which forward may change.
    """

    tensor: Tensor
    start: int
    shape: tuple[int, ...]
    spec: ParameterSpec
    is_replicated: bool
    is_buffer: bool = False

    @staticmethod
    def whole(held: Tensor, spec: ParameterSpec, *, is_buffer: bool = False) -> ParameterShard:
        """Return a rank's whole slice, as a view."""
        return ParameterShard(
            held.view(-1), 0, tuple(held.shape), spec, is_replicated=True, is_buffer=is_buffer
        )


@dataclass(frozen=True)
class LayerContext:
    """Settings that the modules of a model share on a rank, besides the model's config.

    Attributes:
        dtype: dtype of parameters and hidden states.
        seed: seed of initial weights and dropout.
        sequence_parallel: hidden states are cut over tp along the sequence, ``[s/tp, b, h]``, outside of
            attention and MLP (Korthikanti et al. 2022). The gradient of a parameter that tp does not cut is
            then a partial sum over the rank's positions, which the optimizer sums over tp.
        has_documents: samples are packed documents or end with padding, and attention must hide the keys of
            other documents.
        weight_gradient_store: stores the linear layers' weight gradients if the schedule computes them later.
        fuses_weight_gradients: linear layers add their weight gradients to `weight.main_grad`.
        has_weights: False to make parameters on device meta, for a caller that only reads their shapes.
        has_memory: False to make parameters without memory, for ZeRO stage 3, which gathers them.
        fp8: settings of the linear layers' GEMMs in 8 bits; None for GEMMs in `dtype`.
        overlap: how the linear layers' collectives overlap with their GEMMs.
        cp_comm_type: how queries reach the keys of other context-parallel ranks, in all layers or in each;
            `for_layer` chooses for a layer.
        moe_imbalance: rows for this rank's experts, relative to even ones, if tensors have no values.
        moe_token_dispatcher_type: how tokens reach experts that are on axes of their own.
        overlap_slots: lets another action of the pipeline run while rows of experts are in flight, or None.
    """

    topology: Topology
    dtype: torch.dtype
    seed: int = 0
    sequence_parallel: bool = False
    has_documents: bool = False
    weight_gradient_store: WeightGradientStore | None = None
    fuses_weight_gradients: bool = False
    has_weights: bool = True
    has_memory: bool = True
    fp8: Fp8Settings | None = None
    overlap: Overlap = SEPARATE
    cp_comm_type: CpCommTypes = "all_gather"
    moe_imbalance: float = 1.0
    moe_token_dispatcher_type: str = "alltoall"
    overlap_slots: OverlapSlots | None = None

    def for_layer(self, layer: int) -> LayerContext:
        """Return the context of a layer, by its number in the whole model."""
        is_wide = self.fp8 is None or layer in self.fp8.wide_layers
        comm_type = comm_type_of_layer(self.cp_comm_type, layer)
        return replace(self, cp_comm_type=comm_type, fp8=None if is_wide else self.fp8)

    @property
    def tp(self) -> Axis:
        return self.topology.tp

    @property
    def cp(self) -> Axis:
        """Return the ranks that hold different tokens of the same samples."""
        return self.topology.position_ranks

    @property
    def expert_axes(self) -> AxisSet | None:
        """Return the axes that cut experts; None if tp cuts them like an MLP."""
        return self.topology.meshes.get(EXPERTS.name)

    @property
    def device(self) -> torch.device:
        return self.topology.device

    @property
    def attention_heads(self) -> Slice:
        """Return the slice of the query heads whose attention this rank computes."""
        tp, ranks = self.tp, self.head_ranks
        if ranks is None:
            return Slice(tp.rank, tp.size)
        return Slice(tp.rank * ranks.size + ranks.rank, tp.size * ranks.size)

    @property
    def head_ranks(self) -> Axis | None:
        """Return the ranks that exchange tokens for heads before attention; None if none do."""
        return self._ranks_of_level("cp_heads") if self._cp_comm_properties.exchanges_heads else None

    @property
    def ring(self) -> Axis | None:
        """Return the ranks whose keys and values attention receives in turn; None without a ring."""
        return self._ranks_of_level("cp_ring") if self._cp_comm_properties.passes_keys else None

    @property
    def gathers_keys(self) -> bool:
        """Return whether attention has some of the queries and all keys of a sample."""
        return self.cp.size > 1 and self._cp_comm_properties.gathers_keys

    @property
    def layer_cp_comm_type(self) -> CpCommType:
        """Return how queries reach the keys of other context-parallel ranks, in the context of a layer."""
        assert isinstance(self.cp_comm_type, str), "each layer has its own: read it from `for_layer`"
        return self.cp_comm_type

    @property
    def _cp_comm_properties(self) -> CpCommProperties:
        return CP_COMM_PROPERTIES[self.layer_cp_comm_type]

    def _ranks_of_level(self, name: str) -> Axis | None:
        """Return an axis of the two levels of context parallelism, or all ranks; None if there is one."""
        if self.cp.size == 1:
            return None
        if self._cp_comm_properties.has_levels:
            return self.topology.meshes[CONTEXT.name].axes[name]
        return self.cp

    @property
    def sequence_axes(self) -> tuple[str, ...]:
        """Return the names of the axes along which hidden states are cut along the sequence."""
        return (*self.topology.model.mesh_spec.with_role("positions"), *self._axes_within_tokens)

    @property
    def _axes_within_tokens(self) -> tuple[str, ...]:
        """Return the names of the axes along which the hidden states of a rank's tokens are cut."""
        return ("tp",) if self.sequence_parallel else ()

    @property
    def sequence_slice(self) -> Slice:
        """Return the slice of a sample's hidden states that this rank holds."""
        return self.topology.model.slice_along(*self.sequence_axes)

    def position_ranges(self, num_positions: int) -> tuple[range, ...]:
        """Return the sample positions of this rank's `num_positions` hidden states, as ranges in order."""
        within = self.topology.model.slice_along(*self._axes_within_tokens)
        return self.topology.positions.ranges(num_positions * within.count, self.own_tokens(num_positions))

    def runs_of_positions(self, num_positions: int) -> tuple[range, ...]:
        """Return `position_ranges`, by its name until version 0.2."""
        warnings.warn(
            "LayerContext.runs_of_positions is position_ranges now, and this name goes in megalite 0.4",
            FutureWarning,
            stacklevel=2,
        )
        return self.position_ranges(num_positions)

    def ranges_by_samples(
        self, num_positions: int, samples: SampleNumbers
    ) -> list[tuple[Tensor, tuple[range, ...]]]:
        """Return the samples whose `num_positions` hidden states have the same positions, and these.

        Returns:
            Numbers of the samples and `position_ranges`, for each group of samples, in their order.
        """
        if not isinstance(samples, AssignedSamples):
            return [(samples, self.position_ranges(num_positions))]
        numbers, own = samples.numbers.split(1), self.own_tokens(num_positions)
        return [(each, cut_ranges(ranges, own)) for each, ranges in zip(numbers, samples.ranges, strict=True)]

    def positions_of(self, x: Tensor, samples: SampleNumbers) -> Tensor:
        """Return the sample positions of this rank's ``[s, b, ...]``, int64 ``[s, b]``, on its device."""
        positions_by_group = [
            range_positions(ranges, x.device)[:, None].expand(-1, len(numbers))
            for numbers, ranges in self.ranges_by_samples(len(x), samples)
        ]
        return positions_by_group[0] if len(positions_by_group) == 1 else torch.cat(positions_by_group, dim=1)

    def own_tokens(self, num_positions: int) -> slice:
        """Return which of a microbatch's tokens this rank's `num_positions` hidden states belong to."""
        first = self.topology.model.slice_along(*self._axes_within_tokens).index * num_positions
        return slice(first, first + num_positions)


def new_parameter(
    spec: ParameterSpec, context: LayerContext, *, used_by_cut_heads: bool = False
) -> nn.Parameter:
    """Create this rank's uninitialized box with its spec; `counter_random.initialize` fills it.

    Args:
        used_by_cut_heads: each tp rank uses a replicated parameter for its own heads, so its gradient is a
            partial sum over tp, with and without sequence parallelism.

    Raises:
        UserError: a dim is not divisible into equal slices, or an axis cannot cut a parameter.
    """
    mesh_spec = spec.parameter_axes.axes(context.topology).mesh_spec
    if spec.partial_over is None:
        complete = {*spec.parameter_axes.cut_over, *mesh_spec.with_role("replicas")}
        summed = (*context.sequence_axes, *(("tp",) if used_by_cut_heads else ()))
        partial = [name for name in dict.fromkeys(summed) if name in set(mesh_spec.names) - complete]
        spec = replace(spec, partial_over=tuple(partial))
    shape = spec.box(context.topology).shape
    device = context.device if context.has_weights else "meta"
    parameter = nn.Parameter(torch.empty(shape, dtype=context.dtype, device=device))
    if not context.has_memory:
        parameter.data.untyped_storage().resize_(0)
    parameter.spec = spec  # type: ignore[attr-defined]
    return parameter


def new_buffer(full: Tensor, context: LayerContext, cut: Cut | tuple[Cut, ...] | None = None) -> Tensor:
    """Return this rank's box of a buffer, to register it with `register_buffer`.

    A buffer that this function did not make is replicated, like the parameters of torch's modules.

    Args:
        full: its initial values, the same full tensor on every rank.
        cut: how it is cut; see `ParameterSpec`.

    Raises:
        UserError: a dim is not divisible into equal slices, or an axis cannot cut a parameter.
    """
    spec = ParameterSpec(tuple(full.shape), cut, dtype=full.dtype)
    box = spec.box(context.topology)
    buffer = torch.empty(box.shape, dtype=full.dtype, device=context.device).copy_(box.of(full))
    buffer.spec = spec  # type: ignore[attr-defined]
    return buffer


def buffer_spec(buffer: Tensor) -> ParameterSpec:
    """Return the spec that `new_buffer` attached; without one, the buffer is replicated."""
    spec = getattr(buffer, "spec", None) or ParameterSpec(tuple(buffer.shape), dtype=buffer.dtype)
    assert isinstance(spec, ParameterSpec)
    return spec


def replicate_parameters(module: nn.Module, context: LayerContext) -> None:
    """Replicate parameters without a spec, from torch's own modules, on every rank; keep their values.

    Weight decay applies to parameters of two or more dims. Weights of two dims map features to features,
    except for those of `nn.Embedding`. Buffers are moved to the device.
    """
    tables = {each.weight for each in module.modules() if isinstance(each, nn.Embedding)}
    specs: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if hasattr(parameter, "spec"):
                continue
            if parameter not in specs:
                values = parameter.detach()
                spec = ParameterSpec(
                    tuple(values.shape),
                    decay=values.dim() > 1,
                    maps_features=values.dim() == 2 and parameter not in tables,
                    initial=values,
                )
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


def num_used(spec: ParameterSpec, topology: Topology) -> int:
    """Return how many elements of this rank's flattened box come before its padding."""
    return spec.box(topology).num_before(spec.used_shape[0])


def gather_full(local: Tensor, spec: ParameterSpec, topology: Topology) -> Tensor:
    """All-gather the boxes of a parameter, or of its gradient, into the full tensor; only for checks.

    Each rank's slice is placed at the start of its box, and elements in no box are zero: a wrong box shows.
    """
    axes = spec.parameter_axes.axes(topology).axes
    own = {cut.axis: axes[cut.axis].rank for cut in spec.cuts}
    full = local.detach().contiguous().clone()
    for cut in reversed(spec.cuts):  # innermost first
        axis, dim = axes[cut.axis], cut.dim
        if axis.size > 1:
            slices = [torch.empty_like(full) for _ in range(axis.size)]
            dist.all_gather(slices, full, group=axis.group)
            boxes = (spec.box(topology, {**own, cut.axis: rank}) for rank in range(axis.size))
            starts = [box.starts[dim] for box in boxes]
            full = torch.zeros_like(torch.cat(slices, dim))
            for start, each in zip(starts, slices, strict=True):
                full.narrow(dim, start - min(starts), each.shape[dim]).copy_(each)
    return full
