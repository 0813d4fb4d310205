"""Gather whole matrices on the ranks that orthogonalize them, and send the results to the ranks that update.

The ranks that hold the parts of a matrix, and the replicas of these ranks, share the matrices out among them.
One all-to-all moves elements to the owners of matrices, and another one moves results back. Which rank owns a
matrix does not change the result.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.distributed.collectives import all_to_all
from megalite.distributed.topology import Topology
from megalite.optim.adamw import BucketState
from megalite.optim.flat_buffers import BucketEntry
from megalite.tensor_parallel.matrices import Matrix, MatrixPart, matrices_of, newton_schulz_flops
from megalite.tensor_parallel.placement import ParameterAxes


class Holder(NamedTuple):
    """Rank that holds parts of the matrices.

    Attributes:
        coordinates: its coordinates along the axes that cut the parameters.
        shard: its coordinate among the ranks that ZeRO shards over; 0 if ZeRO shards nothing.
        copy: number of its group of ranks, which has all elements once.
    """

    coordinates: tuple[int, ...]
    shard: int
    copy: int


class Piece(NamedTuple):
    """Elements of a matrix that this rank updates.

    Attributes:
        state: number of the state that has them.
        owner: rank that orthogonalizes the matrix.
        slices: consecutive elements in the state.
        numel: number of the elements.
    """

    state: int
    matrix: Matrix
    owner: int
    slices: tuple[slice, ...]
    numel: int


class _Segment(NamedTuple):
    """Elements of a matrix that one rank updates: a range of the flattened block of its box."""

    part: MatrixPart
    start: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.start


class MatrixExchange:
    """Exchange of the matrices of some states, whose parameters the same ranks hold.

    Attributes:
        states: the states by number.
        pieces: this rank's elements, in the order of `scatter`.
    """

    def __init__(
        self,
        states: Mapping[int, BucketState],
        topology: Topology,
        dtype: torch.dtype,
        *,
        splits_fused: bool,
    ) -> None:
        """Assign the matrices to ranks.

        Args:
            dtype: dtype of the exchanged elements.
            splits_fused: see `matrices_of`.
        """
        self.states = states
        self._dtype, self._device = dtype, topology.device
        first = next(iter(states.values()))
        parameter_axes = first.kind.parameter_axes
        self._axis = parameter_axes.holders(topology)
        holders = list(holders_of(parameter_axes, topology, is_sharded=not first.is_replicated))
        here = holders[self._axis.rank]
        found = [
            (number, state, entry, matrix)
            for number, state in states.items()
            for entry in state.entries
            for matrix in matrices_of(entry.spec, splits_fused=splits_fused)
        ]
        owners = share_out([newton_schulz_flops(matrix.shape) for *_, matrix in found], self._axis.size)
        self.pieces: list[Piece] = []
        self._shapes: list[tuple[int, int]] = []  # of this rank's matrices
        self._segments: list[list[_Segment]] = []  # of this rank's matrices, for each holder
        for (number, state, entry, matrix), owner in sorted(
            zip(found, owners, strict=True), key=lambda each: each[1]
        ):
            segment = _segment(state, entry, matrix, parameter_axes, here, topology)
            if segment.numel:
                start, end = _held(state, entry, here)
                offset = entry.start - state.owned.start
                slices = tuple(
                    slice(own.start + offset, own.stop + offset) for own in segment.part.slices(start, end)
                )
                self.pieces.append(Piece(number, matrix, owner, slices, segment.numel))
            if owner == self._axis.rank:
                known: dict[tuple[tuple[int, ...], int], _Segment] = {}
                for holder in holders:
                    if holder[:2] not in known:
                        known[holder[:2]] = _segment(state, entry, matrix, parameter_axes, holder, topology)
                self._shapes.append(matrix.shape)
                self._segments.append([known[holder[:2]] for holder in holders])
        self._is_source = [holder.copy == here.copy for holder in holders]
        owner_sizes = [0] * self._axis.size
        for piece in self.pieces:
            owner_sizes[piece.owner] += piece.numel
        holder_sizes = [
            sum(segments[rank].numel for segments in self._segments) for rank in range(self._axis.size)
        ]
        self._gather_sizes = self._from_sources(owner_sizes), self._from_sources(holder_sizes)
        self._scatter_sizes = holder_sizes, owner_sizes

    def _from_sources(self, sizes: Sequence[int]) -> list[int]:
        """Return the sizes, but 0 for ranks of other copies: they have the elements themselves."""
        return [size if near else 0 for size, near in zip(sizes, self._is_source, strict=True)]

    def gather(self, elements: Mapping[int, Tensor]) -> list[Tensor]:
        """Return this rank's matrices.

        Args:
            elements: the elements of each state, ``[n]``, by number.
        """
        sent = [
            elements[piece.state][own]
            for piece in self.pieces
            if self._is_source[piece.owner]
            for own in piece.slices
        ]
        received = self._all_to_all(sent, *self._gather_sizes)
        ranks = [rank for rank in range(self._axis.size) if self._is_source[rank]]
        sizes = [segments[rank].numel for rank in ranks for segments in self._segments]
        parts = iter(received.split(sizes))
        blocks: list[dict[MatrixPart, list[Tensor]]] = [{} for _ in self._segments]
        for rank in ranks:
            for parts_of_matrix, segments in zip(blocks, self._segments, strict=True):
                parts_of_matrix.setdefault(segments[rank].part, []).append(next(parts))
        matrices = []
        for shape, parts_of_matrix in zip(self._shapes, blocks, strict=True):
            matrix = received.new_empty(shape)
            for part, elements_of_part in parts_of_matrix.items():
                matrix[part.block] = torch.cat(elements_of_part).view(part.shape)
            matrices.append(matrix)
        return matrices

    def scatter(self, matrices: Sequence[Tensor]) -> Tensor:
        """Return the elements of this rank's pieces, flat, from the matrices of all ranks.

        Args:
            matrices: results for the matrices that `gather` returned.
        """
        blocks = [
            {part: matrix[part.block].reshape(-1) for part in dict.fromkeys(each.part for each in segments)}
            for matrix, segments in zip(matrices, self._segments, strict=True)
        ]
        sent = [
            parts_of_matrix[segments[rank].part][segments[rank].start : segments[rank].end]
            for rank in range(self._axis.size)
            for parts_of_matrix, segments in zip(blocks, self._segments, strict=True)
        ]
        return self._all_to_all(sent, *self._scatter_sizes)

    def _all_to_all(self, sent: Sequence[Tensor], to: Sequence[int], from_: Sequence[int]) -> Tensor:
        empty = torch.empty(0, dtype=self._dtype, device=self._device)
        message = torch.cat([empty, *sent]).to(self._dtype)
        return all_to_all(message, to, from_, self._axis, of="matrices")


def holders_of(parameter_axes: ParameterAxes, topology: Topology, *, is_sharded: bool) -> Iterator[Holder]:
    """Yield the ranks of `ParameterAxes.holders`, in the order of their coordinates.

    Args:
        is_sharded: whether ZeRO shards the parameters.
    """
    axes, replicas = parameter_axes.axes(topology), parameter_axes.replicas(topology)
    names = axes.mesh_spec.ordered({*parameter_axes.cut_over, *axes.mesh_spec.with_role("replicas")})
    degree = replicas.shard.size if is_sharded else 1
    for values in itertools.product(*(range(axes.axes[name].size) for name in names)):
        coordinates, replica = dict(zip(names, values, strict=True)), 0
        for name in axes.mesh_spec.with_role("replicas"):
            replica = replica * axes.axes[name].size + coordinates[name]
        copy, shard = divmod(replica, degree)
        yield Holder(tuple(coordinates[name] for name in parameter_axes.cut_over), shard, copy)


def _held(state: BucketState, entry: BucketEntry, holder: Holder) -> tuple[int, int]:
    """Return the range of a parameter's flattened box that a rank updates."""
    numel = entry.end - entry.start
    if state.is_replicated:
        return 0, numel
    owned = state.bucket.shard_of(holder.shard)
    start = min(max(owned.start - entry.start, 0), numel)
    return start, max(min(owned.stop - entry.start, numel), start)


def _segment(
    state: BucketState,
    entry: BucketEntry,
    matrix: Matrix,
    parameter_axes: ParameterAxes,
    holder: Holder,
    topology: Topology,
) -> _Segment:
    coordinates = dict(zip(parameter_axes.cut_over, holder.coordinates, strict=True))
    part = MatrixPart(matrix, entry.spec.box(topology, coordinates))
    start, end = _held(state, entry, holder)
    return _Segment(part, part.num_before(start), part.num_before(end))


def share_out(costs: Sequence[int], count: int) -> list[int]:
    """Return which of `count` ranks does each piece of work.

    The most expensive work is shared out first, each to the rank that has the least so far.
    """
    owners, loads = [0] * len(costs), [0] * count
    for number in sorted(range(len(costs)), key=lambda number: (-costs[number], number)):
        owners[number] = min(range(count), key=lambda rank: (loads[rank], rank))
        loads[owners[number]] += costs[number]
    return owners
