"""Muon (Jordan et al. 2024): momentum whose update is orthogonalized, for the matrices of a model.

A matrix is orthogonalized whole, as in a model without fused weights: the queries, keys and values of all
heads are three matrices, and the two halves of a gated MLP are two.

The ranks that hold the parts of a matrix, and the replicas of these ranks, share the matrices out among them.
One all-to-all moves elements to the owners of matrices, and another one moves results back. Which rank owns a
matrix does not change the result.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.config import OptimizerConfig
from megalite.config.optimizer import MuonCoefficients, MuonScaleMode
from megalite.distributed.collectives import all_to_all
from megalite.distributed.topology import Topology
from megalite.optim.adamw import MOMENTUM, BucketState
from megalite.optim.flat_buffers import BucketEntry, overlap
from megalite.tensor_parallel.matrices import Matrix, MatrixPart, matrices_of, newton_schulz_flops
from megalite.tensor_parallel.placement import ParameterAxes
from megalite.utils.torch_private import foreach_add_, foreach_mul_

EPSILON = 1e-7
"""Smallest norm by which the iteration divides a matrix, as in torch."""
MATRICES_PER_RANK = 4
"""Matrices that a rank orthogonalizes between two exchanges, on average. With more, the exchanges need more
memory; with fewer, the ranks have more unequal work."""

COEFFICIENTS: Mapping[MuonCoefficients, tuple[tuple[float, float, float], ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
    "aol": (
        (4.0098, -7.0585, 2.4635),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ),
}
"""Coefficients (a, b, c) of the steps of the iteration, by Megatron-LM's names: simple from Jordan et al.
2024, quintic from Cesista et al. 2025, polar_express from Amsel et al. 2025 with their safety factor of 1.01,
and aol from Boissin et al. 2025."""

SCALES: Mapping[MuonScaleMode, Callable[[int, int], float]] = {
    "spectral": lambda rows, columns: max(rows, columns) ** 0.5,
    "unit_rms_norm": lambda rows, columns: (rows / columns) ** 0.5,
    "shape_scaling": lambda rows, columns: max(1.0, rows / columns) ** 0.5,
}
"""Factors of the update of a matrix. The names are Megatron-LM's."""


def coefficients_of(kind: MuonCoefficients, num_steps: int) -> Iterator[tuple[float, float, float]]:
    """Yield the coefficients of each step.

    If there are more steps than coefficients, polar_express repeats its last ones, which converge, and the
    others begin again.
    """
    known = COEFFICIENTS[kind]
    for step in range(num_steps):
        yield known[min(step, len(known) - 1) if kind == "polar_express" else step % len(known)]


def orthogonalize(matrix: Tensor, kind: MuonCoefficients, num_steps: int) -> Tensor:
    """Return an approximation of U V^T, where U S V^T is the singular value decomposition of a matrix.

    Each step maps the singular values s to a s + b s^3 + c s^5, by GEMMs of the matrix with its transpose
    (Newton-Schulz iteration). torch.optim.Muon does the same in bf16; this function keeps the dtype.

    Args:
        matrix: ``[m, n]``.
    """
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=EPSILON)
    for a, b, c in coefficients_of(kind, num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class Muon:
    """Muon, for the matrices of the states; gradients are unscaled and clipped.

    As in AdamW, the host never waits, and the device decides whether to update. All ranks that hold parts of
    the same matrices must call `step`.

    Args:
        states: states of matrices; other ranks with parts of the same matrices have theirs in the same order.
        dtype: dtype of the model's weights.
    """

    def __init__(
        self, states: Sequence[BucketState], config: OptimizerConfig, topology: Topology, dtype: torch.dtype
    ) -> None:
        self.states = states
        self.config = config
        self._exchanges = [
            MatrixExchange(
                {number: states[number] for number in numbers},
                topology,
                torch.bfloat16 if dtype.itemsize == 2 else dtype,  # of the iteration: not fp16
                splits_fused=config.muon_split_qkv,
            )
            for numbers in _rounds(states, topology)
        ]

    @torch.no_grad()
    def step(
        self,
        gradients: Sequence[Tensor],
        learning_rate: float,
        weight_decay: float,
        divisor: Tensor | None,
        is_good: Tensor,
    ) -> None:
        """Update momentum and weights; if `is_good` is False, all keep their values.

        Args:
            gradients: one for each of the states; they keep their values.
            divisor: scalar on the device that unscales and clips the gradients; None for 1.
            is_good: a bool scalar on the device.
        """
        kept = 1.0 - (learning_rate * weight_decay) * is_good.double()
        for exchange in self._exchanges:
            received = exchange.scatter(
                [
                    orthogonalize(matrix, self.config.muon_coefficient_type, self.config.muon_num_ns_steps)
                    for matrix in exchange.gather(
                        {
                            number: self._direction(self.states[number], gradients[number], divisor, is_good)
                            for number in exchange.states
                        }
                    )
                ]
            )
            self._update(exchange, received, learning_rate, kept, is_good)

    def _direction(
        self, state: BucketState, gradient: Tensor, divisor: Tensor | None, is_good: Tensor
    ) -> Tensor:
        """Update the momentum; return the elements to orthogonalize, ``[n]``."""
        momentum, weight = state.moments[MOMENTUM], self.config.muon_momentum
        own = gradient if divisor is None else gradient / divisor
        own = torch.where(is_good, own, momentum)  # a bad gradient then changes nothing
        momentum.lerp_(own, 1.0 - weight)
        return own.lerp_(momentum, weight) if self.config.muon_nesterov else momentum

    def _update(
        self,
        exchange: MatrixExchange,
        received: Tensor,
        learning_rate: float,
        kept: Tensor,
        is_good: Tensor,
    ) -> None:
        """Decay the weights and subtract the scaled updates, in the order of the exchange's pieces."""
        states = [state for state in exchange.states.values() if state.main.numel()]
        for state in states:
            state.main.mul_(kept)
        if exchange.pieces:
            scale, factor = SCALES[self.config.muon_scale_mode], self.config.muon_extra_scale_factor
            update = received.to(states[0].main.dtype)
            by_piece = update.split([piece.numel for piece in exchange.pieces])
            factors = [-learning_rate * factor * scale(*piece.matrix.shape) for piece in exchange.pieces]
            foreach_mul_(list(by_piece), factors)
            update.mul_(is_good)
            slices = [(piece.state, own) for piece in exchange.pieces for own in piece.slices]
            foreach_add_(
                [self.states[number].main[own] for number, own in slices],
                list(update.split([own.stop - own.start for _, own in slices])),
            )
        for state in states:
            if state.rounded is not None:
                state.rounded.copy_(state.main)


def _rounds(states: Sequence[BucketState], topology: Topology) -> Iterator[list[int]]:
    """Yield the states that are exchanged together, by number: a few matrices for each rank."""
    for parameter_axes in dict.fromkeys(state.kind.parameter_axes for state in states):
        round_, count = list[int](), 0
        for number, state in enumerate(states):
            if state.kind.parameter_axes != parameter_axes:
                continue
            round_.append(number)
            count += sum(len(matrices_of(entry.spec)) for entry in state.entries)
            if count >= MATRICES_PER_RANK * parameter_axes.holders(topology).size:
                yield round_
                round_, count = [], 0
        if round_:
            yield round_


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


class MatrixPiece(NamedTuple):
    """Elements of a matrix that this rank updates.

    Attributes:
        state: number of the state that has them.
        owner: rank that orthogonalizes the matrix.
        slices: consecutive elements in the state.
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
        self.pieces: list[MatrixPiece] = []
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
                self.pieces.append(MatrixPiece(number, matrix, owner, slices, segment.numel))
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
    held = slice(entry.start, entry.end)
    if not state.is_replicated:
        held = overlap(held, state.bucket.shard_of(holder.shard))
    return held.start - entry.start, held.stop - entry.start


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
