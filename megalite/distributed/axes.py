"""The table of mesh axes: how a rank's number is divided into coordinates, and what ranks along an axis do.

A new axis is one entry here and a field of `ParallelConfig` with its size. Process groups, coordinates, file
names, logs, traces and reports loop over the table.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, get_args

from megalite.utils.errors import UserError

Role = Literal["weights", "samples", "positions", "losses", "replicas"]

REPLICATE, SHARD = "_replicate", "_shard"
"""Suffixes of the parts of an axis that ZeRO divides: ranks with the same shards, and a group with all of
them."""


def whole_axis(name: str) -> str:
    """Return the name of the axis that a part belongs to, and the name of an axis itself."""
    return name.removesuffix(REPLICATE).removesuffix(SHARD)


def coordinates_text(coordinates: Mapping[str, int]) -> str:
    """Format coordinates: "pp 0 dp 1 tp 0"."""
    return " ".join(f"{name} {rank}" for name, rank in coordinates.items())


@dataclass(frozen=True)
class Slice:
    """One of `count` slices of equal length."""

    index: int
    count: int


@dataclass(frozen=True)
class AxisEntry:
    """One axis of the ranks.

    Attributes:
        name: short name; `flag` is made of it.
        meaning: name in words.
        field: field of `ParallelConfig` with its size; empty if the other axes determine it.
        roles: how the ranks along the axis differ. Without a role, they repeat each other's work.

            weights    they hold different parameters, or different slices of them
            samples    they read different samples
            positions  they hold different tokens of the same samples, in slices of equal length; their losses
                       are summed, so they have that role too
            losses     the sum of their losses and token counts is the global batch's
            replicas   they hold the same parameters, and their gradients are summed

        takes_rest: whether the size is by default the number of ranks that the other axes leave; otherwise 1.
        sends_messages: whether its ranks send each other messages, in both directions at the same time.
        file_digits: digits of the coordinate in the name of a checkpoint's file.
        always_named: whether file names and messages name the axis even if it has one rank.
    """

    name: str
    meaning: str
    field: str
    roles: frozenset[Role] = frozenset()
    takes_rest: bool = False
    sends_messages: bool = False
    file_digits: int = 3
    always_named: bool = False

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    def is_named(self, size: int) -> bool:
        """Return whether messages name the axis if it has this size."""
        return size > 1 or self.always_named or self.takes_rest


@dataclass(frozen=True)
class MeshSpec:
    """Division of the number of a rank into coordinates along its axes.

    The rank is ``(first * size of second + second) * size of third + third`` and so on.

    Attributes:
        axes: outermost first. Ranks along the last axis are adjacent: they communicate most and share a node.
        groups: further sets of axes whose ranks get a process group together, besides the sets that have a
            role in common; see `Topology.over`.
    """

    name: str
    axes: tuple[AxisEntry, ...]
    groups: tuple[tuple[str, ...], ...] = ()

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    @property
    def weights_first(self) -> tuple[AxisEntry, ...]:
        """Return the axes that divide the weights, and then the others: the order of file names."""
        return tuple(sorted(self.axes, key=lambda axis: "weights" not in axis.roles))

    @property
    def by_flag(self) -> tuple[AxisEntry, ...]:
        """Return the axes that divide the weights, innermost first, and then the others: tp, pp, dp.

        It is the order of layout names and of messages that ask for another layout.
        """
        divide_weights = [axis for axis in reversed(self.axes) if "weights" in axis.roles]
        return (*divide_weights, *(axis for axis in self.axes if axis not in divide_weights))

    def with_role(self, role: Role) -> tuple[str, ...]:
        """Return the names of the axes with a role, outermost first."""
        return self._by_role[role]

    @cached_property
    def _by_role(self) -> dict[Role, tuple[str, ...]]:
        return {role: tuple(axis.name for axis in self.axes if role in axis.roles) for role in get_args(Role)}

    @property
    def holders(self) -> tuple[str, ...]:
        """Return the names of the axes whose ranks hold parts of the same layers, or their replicas."""
        return tuple(
            axis.name
            for axis in self.axes
            if axis.roles & {"weights", "replicas"} and not axis.sends_messages  # stages hold other layers
        )

    def names_of(self, role: Role) -> tuple[str, ...]:
        """Return the names that the axis of a role's ranks can have: it leaves out axes with one rank."""
        names = self.with_role(role)
        subsets = (some for size in range(1, len(names) + 1) for some in itertools.combinations(names, size))
        return tuple("_".join(some) for some in subsets)

    def combinations(self) -> tuple[tuple[str, ...], ...]:
        """Return the sets of axes whose ranks need a process group together, each outermost first."""
        roles: tuple[Role, ...] = ("samples", "positions", "losses", "replicas")
        wanted = (*(self.with_role(role) for role in roles), *map(self.ordered, self.groups))
        return tuple(dict.fromkeys(names for names in wanted if len(names) > 1))

    def ordered(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return names of axes in the table's order.

        Raises:
            KeyError: a name is not an axis of this mesh.
        """
        wanted = set(names)
        if unknown := wanted - set(self.names):
            raise KeyError(f"{', '.join(sorted(unknown))}: the axes of {self.name} are {self.names}")
        return tuple(name for name in self.names if name in wanted)

    def sizes_in(self, world_size: int, sizes: Mapping[str, int | None]) -> dict[str, int]:
        """Return the size of each axis in a world of this many ranks.

        Args:
            sizes: requested sizes by name; the default if an axis is missing or None.

        Raises:
            UserError: their product is not the world size.
        """
        requested = {axis: sizes.get(axis.name) for axis in self.axes}
        rest = max(1, world_size // math.prod(size or 1 for size in requested.values()))
        found: dict[str, int] = {}
        for axis, size in requested.items():
            found[axis.name] = size or (rest if axis.takes_rest else 1)
            rest = 1 if axis.takes_rest and not size else rest
        if (product := math.prod(found.values())) != world_size:
            named = [axis for axis in self.by_flag if axis.is_named(found[axis.name])]
            *flags, last = (axis.flag for axis in named if axis.field)
            text = " x ".join(f"{axis.name} {found[axis.name]}" for axis in named)
            raise UserError(
                f"world size {world_size} is not {text} = {product}: start {product} ranks (torchrun "
                f"--nproc-per-node), or change {', '.join(flags)} or {last}"
            )
        return found


_DIFFERENT_WEIGHTS: frozenset[Role] = frozenset({"weights"})
_ALL_OF_DATA: frozenset[Role] = frozenset({"samples", "losses", "replicas"})

MODEL = MeshSpec(
    "model",
    (
        AxisEntry(
            "pp",
            "pipeline-parallel",
            "pipeline_model_parallel_size",
            _DIFFERENT_WEIGHTS,
            sends_messages=True,
            file_digits=2,
            always_named=True,
        ),
        AxisEntry("dp", "data-parallel", "data_parallel_size", _ALL_OF_DATA, takes_rest=True),
        AxisEntry(
            "cp",
            "context-parallel",
            "context_parallel_size",
            frozenset({"positions", "losses", "replicas"}),
        ),
        AxisEntry(
            "tp",
            "tensor-parallel",
            "tensor_model_parallel_size",
            _DIFFERENT_WEIGHTS,
            file_digits=2,
            always_named=True,
        ),
    ),
    groups=(("cp", "tp"),),  # they cut hidden states along the sequence, whose tokens routers count
)
"""The axes that divide the model and its data."""

EXPERTS = MeshSpec(
    "experts",
    (
        MODEL.axes[0],
        AxisEntry("edp", "expert data-parallel", "", frozenset({"replicas"}), takes_rest=True),
        AxisEntry("ep", "expert-parallel", "expert_model_parallel_size", _DIFFERENT_WEIGHTS),
        AxisEntry("etp", "expert tensor-parallel", "expert_tensor_parallel_size", _DIFFERENT_WEIGHTS),
    ),
    groups=(("ep", "etp"),),  # a token goes to the ranks that hold its expert
)
"""The axes that divide experts: the ranks of a stage, dp x cp x tp for other weights, are edp x ep x etp for
those of experts (parallel folding, Liu et al. 2025, arXiv 2504.14960)."""

CONTEXT = MeshSpec(
    "context",
    tuple(
        replace(axis, roles=frozenset())
        for axis in (
            *MODEL.axes[:2],
            AxisEntry("cp_ring", "context-parallel ring", ""),
            AxisEntry("cp_heads", "context-parallel heads", ""),
            MODEL.axes[3],
        )
    ),
)
"""The axes of context parallelism in two levels: neighbouring cp ranks exchange heads, and groups of them
form a ring. They have no roles, because the axes of `MODEL` have them."""

AXES = (MODEL,)
"""The table: the model's mesh of the ranks comes first. Others, such as `EXPERTS`, divide the same ranks
in another way. An axis that has the same name in two of them must have the same ranks in both."""


@dataclass(frozen=True)
class MeshOptions:
    """Sizes of the axes, and how the ranks communicate.

    `ParallelConfig.mesh` makes it from a config.

    Attributes:
        sizes: size of each axis by name; None or missing for the default.
        table: the axes; the first mesh is the model's.
        shard_degree: number of neighbouring replicas that ZeRO shards over: None for all of them, 0 for the
            replicas of a node.
        num_shard_groups: number of groups of replicas within which ZeRO shards, instead of `shard_degree`.
        zero_stage: ZeRO stage, which determines settings of CUDA.
        backend: auto, gloo or nccl.
        ranks_share_gpus: several ranks may use one GPU.
        timeout_minutes: minutes before a collective fails.
        num_threads: CPU threads per rank; None for the default.
        keep_freed_memory: reuse freed memory on a CPU rank.
        requests_symmetric_memory: tensor-parallel collectives may use symmetric memory, which determines
            settings of CUDA.
        is_zigzag: ranks hold positions in zigzag order; see `HeldPositions`.
        assigns_documents: each sample's documents are assigned to the ranks; see `HeldPositions`.
    """

    sizes: Mapping[str, int | None] = field(default_factory=dict)
    table: tuple[MeshSpec, ...] = AXES
    shard_degree: int | None = None
    num_shard_groups: int | None = None
    zero_stage: int = 0
    backend: str = "auto"
    ranks_share_gpus: bool = False
    timeout_minutes: float = 10.0
    num_threads: int | None = None
    keep_freed_memory: bool = True
    requests_symmetric_memory: bool = False
    is_zigzag: bool = False
    assigns_documents: bool = False

    @property
    def model(self) -> MeshSpec:
        """Return the model's mesh."""
        return self.table[0]

    def num_ranks(self, role: Role, world_size: int | None) -> int | None:
        """Return the number of ranks that have a role; None if the world size is needed and unknown."""
        names, sizes = self.model.with_role(role), self.sizes
        is_whole = world_size is not None and world_size % self.smallest_world == 0
        if world_size is not None and is_whole and None in map(sizes.get, names):
            sizes = self.model.sizes_in(world_size, self.sizes)  # experts may not divide these ranks
        factors = [sizes.get(name) for name in names]
        return math.prod(size for size in factors if size) if all(factors) else None

    @property
    def num_position_slices(self) -> int:
        """Return the number of ranks that the tokens of each sample are cut over."""
        return math.prod(self.sizes.get(name) or 1 for name in self.model.with_role("positions"))

    @property
    def num_token_ranges(self) -> int:
        """Return the number of ranges of consecutive tokens that ranks cut each sample into."""
        return self.num_position_slices * (2 if self.is_zigzag else 1)

    def sizes_in(self, world_size: int) -> dict[str, int]:
        """Return the size of each axis of all meshes in a world of this many ranks.

        Raises:
            UserError: the product of a mesh is not the world size.
        """
        found: dict[str, int] = {}
        for mesh_spec in self.table:
            found |= mesh_spec.sizes_in(world_size, {**self.sizes, **found})
        return found

    @property
    def smallest_world(self) -> int:
        """Return the number of ranks if each axis without a size has its smallest size."""
        return math.prod(self.sizes.get(name) or 1 for name in self.model.names)

    @property
    def shards_within_node(self) -> bool:
        """Return whether ZeRO shards over the replicas of a node, whatever their number."""
        return self.shard_degree == 0 and self.num_shard_groups is None

    def shard_degree_among(self, num_replicas: int, distance: int, ranks_per_node: int) -> int:
        """Return the number of neighbouring replicas that ZeRO shards over.

        Args:
            distance: difference between the numbers of two neighbouring replicas' ranks.
            ranks_per_node: with `shards_within_node`, the result is the largest divisor of `num_replicas`
                whose replicas divide a node evenly; 1 if there is none.
        """
        if self.num_shard_groups is not None:
            return num_replicas // self.num_shard_groups
        if self.shards_within_node:
            whole = ranks_per_node // distance if ranks_per_node % distance == 0 else 1
            return math.gcd(num_replicas, whole)
        return self.shard_degree or num_replicas

    def shard_degree_in(self, sizes: Mapping[str, int], local_world_size: int) -> int:
        """Return how many replicas of the model ZeRO shards over, on nodes with `local_world_size` ranks.

        Raises:
            UserError: the replicas do not divide into such groups.
        """
        names = self.model.with_role("replicas")
        num_replicas = math.prod(sizes[name] for name in names)
        inside = self.model.axes[1 + max(map(self.model.names.index, names), default=-1) :]
        distance = math.prod(sizes[axis.name] for axis in inside)
        degree = self.shard_degree_among(num_replicas, distance, local_world_size)
        if self.shards_within_node and degree == 1 < num_replicas:
            replica = " x ".join(f"{axis.flag} {sizes[axis.name]}" for axis in inside)
            raise UserError(
                f"--shard-within-node: the {local_world_size} ranks of a node do not hold two complete "
                f"replicas of {replica} that divide the {num_replicas} replicas: pass "
                "--data-parallel-shard-degree N, or remove it to shard over all of them"
            )
        if num_replicas % degree:
            raise UserError(
                f"--data-parallel-shard-degree {degree} does not divide the number of replicas "
                f"{num_replicas}: pass one of its divisors"
            )
        return degree
