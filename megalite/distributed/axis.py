"""The axes of the ranks, seen from one rank, and the positions of each sample that it holds.

`build_axes` builds the mesh of all ranks, with a process group for each line of ranks along an axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megalite.distributed.axes import REPLICATE, SHARD, MeshOptions, MeshSpec, Role, Slice
from megalite.utils.torch_private import without_cpp_warnings

T = TypeVar("T")

WORLD = "world"
"""Name of the axis of all ranks; it is not an axis of the mesh."""


@dataclass(frozen=True)
class Axis:
    """One mesh axis, or several together, seen from one rank.

    Attributes:
        size: number of ranks along the axis.
        rank: this rank's coordinate, in [0, size).
        ranks: global ranks along the axis, in order of their coordinate.
        group: process group of those ranks.
        backward_group: on an axis whose ranks send messages, a second group of the same ranks for gradients,
            so that their messages do not wait for messages with hidden states.
        sharded: on the axis of replicas, this rank's group of neighbours that ZeRO shards over; None if ZeRO
            shards over the whole axis.
        replicate: ranks that hold the same shards as this rank, one from each group; None if there is one
            group.
        spans: names of the mesh axes that these ranks differ along, outermost first.
        observers: those of all events of this rank, shared by all axes; a wait for other ranks is one.
    """

    name: str
    size: int
    rank: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup
    backward_group: dist.ProcessGroup | None = None
    sharded: Axis | None = None
    replicate: Axis | None = None
    spans: tuple[str, ...] = ()
    observers: list[Observer] = field(default_factory=list, compare=False, repr=False)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    @property
    def shard(self) -> Axis:
        """Return the ranks that ZeRO shards over."""
        return self.sharded or self

    @property
    def parts(self) -> tuple[Axis, ...]:
        """Return the axis, and the parts that ZeRO divides it into, if any."""
        return (self, *(part for part in (self.replicate, self.sharded) if part is not None))

    def wait_begins(self, what: str, of: object = "", peer: int | None = None) -> None:
        """Post that this rank begins to wait in a collective or for a message; see `Wait`."""
        for observer in self.observers:
            observer.begins(Wait(self.name, what, of, peer))

    def wait_ends(self, what: str, of: object = "", peer: int | None = None) -> None:
        """Post that this wait has ended."""
        for observer in self.observers:
            observer.ends(Wait(self.name, what, of, peer))

    def wait(self, what: str, of: object = "") -> AbstractContextManager[None]:
        """Post that this rank waits in the block."""
        return observed(self.observers, Wait(self.name, what, of))

    def gather_objects(self, mine: T, of: str) -> list[T]:
        """Return an object of each rank of the axis, in order, on all of them; a collective that pickles."""
        found = [mine] * self.size
        with self.wait("all-gather", of):
            if self.size > 1:
                dist.all_gather_object(found, mine, group=self.group)
        return found

    def objects_at_last(self, mine: T, of: str) -> list[T] | None:
        """Return an object of each rank of the axis, in order, on the last of them; None on the others."""
        found = [mine] * self.size if self.rank == self.size - 1 else None
        with self.wait("gather", of):
            dist.gather_object(mine, found, dst=self.ranks[-1], group=self.group)
        return found

    def object_of_first(self, mine: T, of: str) -> T:
        """Return the object of the axis's first rank, on all of them; a collective that pickles."""
        found = [mine]
        with self.wait("broadcast", of):
            if self.size > 1:
                dist.broadcast_object_list(found, self.ranks[0], self.group)
        return found[0]


@dataclass(frozen=True)
class AxisSet:
    """Axes of one mesh of the ranks, seen from one rank.

    Attributes:
        mesh_spec: its entry in the table.
        axes: each axis by name, in the table's order.
        combined: several axes as one, by their names in the table's order.
    """

    mesh_spec: MeshSpec
    axes: Mapping[str, Axis]
    combined: Mapping[tuple[str, ...], Axis]

    @property
    def named(self) -> dict[str, Axis]:
        """Return the axes that messages name, in the table's order; see `AxisEntry.is_named`."""
        entries = {entry.name: entry for entry in self.mesh_spec.axes}
        return {name: axis for name, axis in self.axes.items() if entries[name].is_named(axis.size)}

    @property
    def coordinates(self) -> dict[str, int]:
        """Return this rank's coordinate along each axis that messages name, in the table's order."""
        return {name: axis.rank for name, axis in self.named.items()}

    def over(self, *names: str) -> Axis:
        """Return the ranks along several axes together, in the order of their coordinates.

        It is one of the axes if the others have a single rank.

        Raises:
            KeyError: no process group spans the axes: declare them in `MeshSpec.groups`.
        """
        ordered = self.mesh_spec.ordered(names)
        large = tuple(name for name in ordered if self.axes[name].size > 1)
        if len(large) < 2:
            return self.axes[(large or ordered)[0]]
        if large not in self.combined:
            raise KeyError(f"no process group spans {large}: declare it in the table of axes")
        return self.combined[large]

    def slice_along(self, *names: str) -> Slice:
        """Return the slice that this rank holds of what these axes cut together, the outermost first."""
        index, count = 0, 1
        for name in self.mesh_spec.ordered(names):
            index, count = index * self.axes[name].size + self.axes[name].rank, count * self.axes[name].size
        return Slice(index, count)

    def with_role(self, role: Role) -> Axis:
        """Return the ranks that have a role, in the order of their coordinates."""
        return self.over(*self.mesh_spec.with_role(role))

    def is_first_outside(self, *axes: Axis) -> bool:
        """Return whether this rank is the first of the ranks that differ only along other axes than these."""
        inside = {name for axis in axes for name in axis.spans}
        return all(axis.is_first for name, axis in self.axes.items() if name not in inside)


CHECKPOINT = "checkpoint I/O"
"""Event: the rank reads or writes a checkpoint, or waits for a background save."""
PROFILER = "collecting a profile"
"""Event: the rank collects or writes a profiler trace."""
DEVICE = "waiting for the device"
"""Event: the host waits for kernels that it launched, including collectives."""
HOST_UPDATE = "waiting for the update of offloaded optimizer state"
"""Event: forward, or other code that reads the weights, waits for a thread that updates them."""
STORE_BARRIER = "store barrier"
"""Value of `Wait.what`: ranks wait for each other through the store, for as long as one of them works."""


class Observer(Protocol):
    """Observer of the beginning and end of each event of this rank, in nesting order.

    Events are actions of a pipeline, waits for other ranks, and parts of the program by their timers' names.
    """

    def begins(self, what: Any) -> None:
        """Handle the beginning of an event. The input of a pipeline action may not have arrived yet."""

    def ends(self, what: Any) -> None:
        """Handle the end of an event on the host; device work may still run."""


class Wait(NamedTuple):
    """Wait for other ranks.

    Attributes:
        axis: name of the mesh axis that connects them.
        what: the collective, or the kind of message.
        of: the data: a text, or the pipeline action that reads the message.
        peer: rank at the other end of a message; None in a collective.
    """

    axis: str
    what: str
    of: object = ""
    peer: int | None = None


class EventStack:
    """Events of this process that have begun and not ended; it can observe any event.

    Only one thread posts at a time: the main thread, or one that it waits for (autograd's, or a thread of
    `OverlapSlots`). Other threads can read.
    """

    def __init__(self) -> None:
        self._open: list[object] = []

    def begins(self, what: object) -> None:
        self._open.append(what)

    def ends(self, what: object) -> None:
        while self._open and self._open.pop() != what:
            pass  # an exception ended this event

    def during(self, what: object) -> AbstractContextManager[None]:
        """Post an event that begins and ends with the block."""
        return observed((self,), what)

    def now(self) -> tuple[object, ...]:
        """Return the open events, outermost first; any thread can call this."""
        return tuple(self._open)


@contextmanager
def observed(observers: Sequence[Observer], what: object) -> Iterator[None]:
    """Post an event that begins and ends with the block, even if the block raises."""
    for observer in observers:
        observer.begins(what)
    try:
        yield
    finally:
        for observer in observers:
            observer.ends(what)


@contextmanager
def observing(observers: list[Observer], *more: Observer) -> Iterator[None]:
    """Add observers to a list, such as `Topology.observers`, in this block."""
    observers.extend(more)
    try:
        yield
    finally:
        for observer in more:
            observers.remove(observer)


@dataclass(frozen=True)
class HeldPositions:
    """Positions of each sample that one of `count` ranks holds, in the order of its tokens.

    They are consecutive. In zigzag order, they are two of 2 `count` slices, number `index` and the same
    number from the end. In causal attention, all ranks then compute as many scores. Megatron-LM has this
    order.

    Attributes:
        index: coordinate of the rank among the ranks that hold different positions.
        count: number of these ranks.
        is_zigzag: whether a rank holds two slices.
        assigns_documents: whether `Microbatch.assignments` says which positions a rank holds, because each
            sample has documents of its own. Then only `index` and `count` may be read here.
    """

    index: int
    count: int
    is_zigzag: bool = False
    assigns_documents: bool = False

    @property
    def slices(self) -> tuple[Slice, ...]:
        """Return the slices of the sample that the rank holds."""
        return self.slices_of(self.index)

    def slices_of(self, index: int) -> tuple[Slice, ...]:
        """Return the slices of the sample that the rank with this coordinate holds."""
        assert not self.assigns_documents, "a microbatch's assignments determine the positions"
        if not self.is_zigzag or self.count == 1:
            return (Slice(index, self.count),)
        num_slices = 2 * self.count
        return Slice(index, num_slices), Slice(num_slices - 1 - index, num_slices)

    def ranges(self, num_tokens: int, part: slice | None = None) -> tuple[range, ...]:
        """Return the positions of the rank's tokens as ranges, in the order of the tokens.

        Args:
            num_tokens: number of tokens of a sample that the rank holds.
            part: which of these tokens are wanted; None for all.
        """
        length = num_tokens // len(self.slices)
        ranges = (range(each.index * length, (each.index + 1) * length) for each in self.slices)
        return cut_ranges(ranges, part or slice(0, num_tokens))

    def group_positions(self, size: int) -> HeldPositions:
        """Return the positions that a group of `size` neighbouring ranks holds together, in order."""
        return replace(self, index=self.index // size, count=self.count // size)

    def take(self, x: Tensor, dim: int = -1) -> Tensor:
        """Return the rank's positions of a tensor of whole samples; a view if they are consecutive.

        Args:
            dim: the dim of the positions.
        """
        ranges = self.ranges(x.shape[dim] // self.count)
        parts = [x.narrow(dim, positions.start, len(positions)) for positions in ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def in_position_order(self, x: Tensor) -> Tensor:
        """Return ``[s, ...]``, the tokens of two ranks together, in the order of positions."""
        order = self._slices_by_rank
        return _reordered(x, [order.index(number) for number in range(len(order))])

    def in_rank_order(self, x: Tensor) -> Tensor:
        """Return the tokens of a sample, ``[s, ...]``, in the order of the ranks that hold them."""
        return _reordered(x, self._slices_by_rank)

    @property
    def _slices_by_rank(self) -> list[int]:
        """Return the numbers of the sample's slices in the order of the ranks that hold them."""
        return [each.index for rank in range(self.count) for each in self.slices_of(rank)]


def cut_ranges(ranges: Iterable[range], part: slice) -> tuple[range, ...]:
    """Return the positions of some of the tokens that have the positions of these ranges, in their order."""
    found, first = [], 0
    for positions in ranges:
        own = positions[max(part.start - first, 0) : max(part.stop - first, 0)]
        if own:
            found.append(own)
        first += len(positions)
    return tuple(found)


def range_positions(ranges: Iterable[range], device: torch.device) -> Tensor:
    """Return the positions of these ranges, int64 ``[s]``; the host does not wait for the device."""
    return torch.cat([torch.arange(positions.start, positions.stop, device=device) for positions in ranges])


def _reordered(x: Tensor, order: list[int]) -> Tensor:
    """Return equal slices of the first dim in this order; x itself if they are in it."""
    if order == sorted(order):
        return x
    slices = x.chunk(len(order))
    return torch.cat([slices[number] for number in order])


# Splits of a group with both backends have NCCL's options, of which gloo warns; it ignores them.
@without_cpp_warnings()
def build_axes(
    options: MeshOptions, sizes: Mapping[str, int], shard_degree: int, rank: int, device_type: str
) -> tuple[DeviceMesh, dict[str, AxisSet]]:
    """Return the mesh of the model's axes, and the axes of each mesh; every rank must call it.

    Args:
        sizes: size of each axis of all meshes.
        shard_degree: number of replicas of the model that ZeRO shards over.
    """
    mesh = _build_mesh(options.model, sizes, device_type)
    known = {name: _axis(mesh[name], name) for name in options.model.names}
    for entry in options.model.axes:
        if entry.sends_messages and sizes[entry.name] > 1:
            lines = lines_along(options.model, sizes, (entry.name,))
            group = new_groups(device_type, lines, f"{entry.name}_backward")
            known[entry.name] = replace(known[entry.name], backward_group=group)
    found: dict[str, AxisSet] = {}
    for mesh_spec in options.table:
        axes = _axis_set(mesh_spec, sizes, known, rank, device_type)
        if mesh_spec is options.model:
            axes = _divided(axes, sizes, shard_degree, rank, device_type)
        found[mesh_spec.name] = axes
        known |= axes.axes
    return mesh, found


def _build_mesh(mesh_spec: MeshSpec, sizes: Mapping[str, int], device_type: str) -> DeviceMesh:
    names = mesh_spec.names
    replicas = [name for name in mesh_spec.with_role("replicas") if sizes[name] > 1]
    options = group_options(device_type, len(replicas) + 1, *replicas)
    return init_device_mesh(
        device_type,
        tuple(sizes[name] for name in names),
        mesh_dim_names=names,
        backend_override=options,
    )


def group_options(device_type: str, dp: int, *names: str) -> dict[int | str, Any] | None:
    """Return NCCL options for the groups between `dp` replicas, by axis; None for torch's defaults.

    Their collectives run on a high-priority stream. They overlap with GEMMs, whose waiting thread blocks
    would otherwise all start first.
    """
    if device_type != "cuda" or dp == 1:
        return None
    return {name: dist.ProcessGroupNCCL.Options(is_high_priority_stream=True) for name in names}


def lines_along(mesh_spec: MeshSpec, sizes: Mapping[str, int], names: Sequence[str]) -> list[list[int]]:
    """Return all lines of ranks along these axes together, each in the order of its coordinates."""
    shape = [sizes[name] for name in mesh_spec.names]
    dims = [mesh_spec.names.index(name) for name in mesh_spec.ordered(names)]
    ranks = torch.arange(math.prod(shape)).view(shape).movedim(dims, list(range(-len(dims), 0)))
    return ranks.reshape(-1, math.prod(shape[dim] for dim in dims)).tolist()


def new_groups(
    device_type: str, lines: Sequence[Sequence[int]], name: str, *, is_urgent: bool = False
) -> dist.ProcessGroup:
    """Create a process group for each line of ranks, and return this rank's; every rank must call it.

    Args:
        lines: lines that together have each rank once.
        is_urgent: run the collectives on a high-priority stream of a GPU; see `group_options`.
    """
    description = f"mesh_{name}"
    if device_type == "cuda":  # one call splits NCCL's communicator for all lines
        options = group_options(device_type, 2, name) if is_urgent else None
        more = {} if options is None else {"pg_options": options[name]}
        group = dist.split_group(split_ranks=[list(line) for line in lines], group_desc=description, **more)
    else:
        group, _ = dist.new_subgroups_by_enumeration(lines, group_desc=description)
    assert group is not None
    return group


def _axis(line: DeviceMesh, name: str) -> Axis:
    ranks = tuple(line.mesh.tolist())
    return Axis(name, len(ranks), line.get_local_rank(), ranks, line.get_group(), spans=(name,))


def _axis_set(
    mesh_spec: MeshSpec, sizes: Mapping[str, int], known: Mapping[str, Axis], rank: int, device_type: str
) -> AxisSet:
    """Create the axes of a mesh that are not known yet, and its combinations of axes."""
    replicas = set(mesh_spec.with_role("replicas"))

    def axis_over(*names: str) -> Axis:
        lines = lines_along(mesh_spec, sizes, names)
        group = new_groups(device_type, lines, "_".join(names), is_urgent=replicas.issuperset(names))
        return _axis_of(lines, rank, "_".join(names), names, group)

    axes = {}
    for name in mesh_spec.names:
        axes[name] = known[name] if name in known else axis_over(name)
        line = next(line for line in lines_along(mesh_spec, sizes, (name,)) if rank in line)
        assert axes[name].ranks == tuple(line), f"{name} has other ranks in {mesh_spec.name}"
    large = [tuple(name for name in names if sizes[name] > 1) for names in mesh_spec.combinations()]
    combined = {names: axis_over(*names) for names in dict.fromkeys(large) if len(names) > 1}
    return AxisSet(mesh_spec, axes, combined)


def _divided(
    found: AxisSet, sizes: Mapping[str, int], shard_degree: int, rank: int, device_type: str
) -> AxisSet:
    """Divide the axis of replicas into groups of `shard_degree` neighbours that ZeRO shards over."""
    whole = found.with_role("replicas")
    if shard_degree == whole.size:
        return found
    parts = []
    lines = lines_along(found.mesh_spec, sizes, whole.spans)
    groups = [line[i : i + shard_degree] for line in lines for i in range(0, whole.size, shard_degree)]
    across = [line[i::shard_degree] for line in lines for i in range(shard_degree)]
    for suffix, part in ((REPLICATE, across), (SHARD, groups)):
        group = new_groups(device_type, part, whole.name + suffix, is_urgent=True)
        parts.append(_axis_of(part, rank, whole.name + suffix, whole.spans, group))
    divided = replace(whole, replicate=parts[0], sharded=parts[1])
    return replace(
        found,
        axes={name: divided if axis is whole else axis for name, axis in found.axes.items()},
        combined={names: divided if axis is whole else axis for names, axis in found.combined.items()},
    )


def _axis_of(
    lines: Sequence[Sequence[int]], rank: int, name: str, spans: tuple[str, ...], group: dist.ProcessGroup
) -> Axis:
    line = next(line for line in lines if rank in line)
    return Axis(name, len(line), line.index(rank), tuple(line), group, spans=spans)
