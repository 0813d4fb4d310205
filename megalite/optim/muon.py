"""Muon (Jordan et al. 2024): momentum whose update is orthogonalized, for the matrices of a model.

A matrix is orthogonalized whole, as in a model without fused weights: the queries, keys and values of all
heads are three matrices, and the two halves of a gated MLP are two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megalite.config import OptimizerConfig
from megalite.config.optimizer import MuonCoefficients, MuonScaleMode
from megalite.distributed.topology import Topology
from megalite.optim.adamw import MOMENTUM, BucketState
from megalite.optim.matrix_exchange import MatrixExchange
from megalite.tensor_parallel.matrices import matrices_of
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


def orthogonalization_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the iteration for weights of `dtype`: theirs, but bf16 instead of fp16."""
    return torch.bfloat16 if dtype.itemsize == 2 else dtype


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
                orthogonalization_dtype(dtype),
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
