"""The GEMMs of tensor-parallel linear layers with the collectives before or after them.

A layer's forward and backward have four such pairs. With sequence parallelism:

    layer     pass        pair
    column    forward     all-gather of x, then x weight^T
    row       forward     x weight^T, then reduce-scatter
    row       backward    all-gather of the gradient, then gradient weight
    column    backward    gradient weight, then reduce-scatter

Without it, nothing is gathered, and the sums are all-reduces. `SeparateCollectives` runs a collective before
or after its GEMM. The others overlap both (Wang et al. 2023, "Overlap Communication with Dependent
Computation via Decomposition in Large Deep Learning Models"): `ChunkedCollectives` with the collectives of
any backend, and `SymmetricMemoryCollectives` with torch's operators in memory that all GPUs of the group
access.

Collectives are launched in the order in which a GPU with one connection should start them
(`CUDA_DEVICE_MAX_CONNECTIONS=1`). Kernels then start in launch order, and a kernel that waits for another one
holds up all kernels launched after it. The all-gather of part i + 1 is therefore launched just before the
GEMM of part i, and not earlier: it waits for the all-gather of part i, like that GEMM. The sum of part i is
launched just before the GEMM of part i + 1, which then cannot take all multiprocessors first.

Shapes: s sequence, b microbatch, tp = tp.size. A part has c of the s/tp positions of each rank's slice, or
with all-reduces c of the s positions.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megalite.config import ParallelConfig
from megalite.config.parallel import TpCommOverlapMethod
from megalite.config.training import Fp8Options
from megalite.distributed.axis import Axis
from megalite.distributed.collectives import (
    Pending,
    flat_reduce_scatter,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megalite.distributed.topology import Topology
from megalite.tensor_parallel.gemm import Gemm
from megalite.utils import torch_private


class PendingSum(Protocol):
    """Sum over the ranks in flight."""

    def wait(self) -> Tensor:
        """Wait for the collectives and return the result."""


class PendingParts(NamedTuple):
    """Sum in flight whose parts are collectives of their own."""

    tensor: Tensor
    parts: Sequence[Pending]

    def wait(self) -> Tensor:
        """Wait for all parts and return the result."""
        for part in self.parts:
            part.wait()
        return self.tensor


class SeparateCollectives:
    """Collectives before or after their GEMMs.

    Args:
        sequence_parallel: inputs are gathered along the sequence and outputs reduce-scattered; otherwise
            outputs are all-reduced.
        num_chunks: not used; the kinds of collectives have the same arguments.
    """

    def __init__(self, gemm: Gemm, tp: Axis, sequence_parallel: bool, num_chunks: int = 1) -> None:
        self.gemm = gemm
        self.tp = tp
        self.sequence_parallel = sequence_parallel and tp.size > 1

    @property
    def splits_column_gemm(self) -> bool:
        """Return whether the GEMM of a column layer's forward is split, so that it has no epilogue."""
        return False

    def start_gather(self, x: Tensor) -> Pending:
        """Start ``[s/tp, b, n]`` -> ``[s, b, n]`` if sequence parallel."""
        return start_all_gather(x, self.tp) if self.sequence_parallel else Pending(x, None)

    def start_sum(self, x: Tensor) -> Pending:
        """Start to sum the ranks' ``[s, b, n]``, in place or into ``[s/tp, b, n]`` if sequence parallel."""
        return (start_reduce_scatter if self.sequence_parallel else start_all_reduce)(x, self.tp)

    def forward_of_gathered(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Gather ``[s/tp, b, in]``, and multiply: ``[s, b, out]``."""
        return self.gemm.forward(self.start_gather(x).wait(), weight, bias)

    def summed_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply ``[s, b, in]``, and sum: ``[s, b, out]``, or ``[s/tp, b, out]`` if sequence parallel.

        Args:
            bias: added before the sum.
        """
        return self.start_sum(self.gemm.forward(x, weight, bias)).wait()

    def input_gradient_of_gathered(self, grad: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Gather ``[s/tp, b, out]``, and multiply. Return ``[s, b, in]``, and the gathered gradient."""
        grad = self.start_gather(grad).wait()
        return self.gemm.input_gradient(grad, weight, self.gemm.scales(grad, weight)), grad

    def start_summed_input_gradient(
        self, grad: Tensor, weight: Tensor, scales: tuple[Tensor, Tensor] | None
    ) -> PendingSum:
        """Multiply ``[s, b, out]``, and start to sum: ``[s, b, in]``, or ``[s/tp, b, in]``."""
        return self.start_sum(self.gemm.input_gradient(grad, weight, scales))


class ChunkedCollectives(SeparateCollectives):
    """Collectives in parts of the positions: a part's collective overlaps another part's GEMM.

    Each row of a result is the product of the same row as without parts. Weight gradients are not split.
    Neither is the gather in the row layer's backward: its weight gradient needs the gathered gradient in
    order, and the planner expects that copying the parts costs more than the overlap saves.

    Operands are rounded before they are split, and an input before it is gathered: by blocks within a row.

    With sequence parallelism, a part has the same positions of each rank's slice. A GEMM of a part is a batch
    of tp GEMMs that reads or writes these rows where they are.

    Args:
        gemm: rounds the operands in blocks, or not at all; their GEMM is in the dtype of the tensors.
            GEMMs with a scale for each tensor are not split.
        num_chunks: number of parts; fewer if there are fewer positions.
    """

    def __init__(self, gemm: Gemm, tp: Axis, sequence_parallel: bool, num_chunks: int) -> None:
        super().__init__(gemm, tp, sequence_parallel)
        self.num_chunks = num_chunks

    @property
    def splits_column_gemm(self) -> bool:
        """Return whether the column layer's input is gathered in parts."""
        return self.sequence_parallel

    def forward_of_gathered(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Gather a part while the part before it is multiplied."""
        if not self.sequence_parallel:
            return super().forward_of_gathered(x, weight, bias)
        return self._gather_and_multiply(self.gemm.rounded_input(x), self._forward_matrix(weight), bias)

    def summed_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Sum a part while the part after it is multiplied."""
        return self._multiply_and_sum(self.gemm.rounded_input(x), self._forward_matrix(weight), bias).wait()

    def start_summed_input_gradient(
        self, grad: Tensor, weight: Tensor, scales: tuple[Tensor, Tensor] | None
    ) -> PendingSum:
        """Sum a part while the part after it is multiplied."""
        matrix = self.gemm.rounded_weight(weight, sums_over_rows=True)
        return self._multiply_and_sum(self.gemm.rounded_gradient(grad), matrix, None)

    def _forward_matrix(self, weight: Tensor) -> Tensor:
        """Return the rounded weight, ``[out, in]``, as ``[in, out]``."""
        return self.gemm.rounded_weight(weight.detach(), sums_over_rows=False).t()

    def _gather_and_multiply(self, x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        """Compute ``x matrix + bias``: ``[s/tp, b, k]`` and ``[k, n]`` -> ``[s, b, n]``."""
        y = x.new_empty(self.tp.size * x.shape[0], *x.shape[1:-1], matrix.shape[1])
        y_by_rank = y.unflatten(0, (self.tp.size, -1))  # [tp, s/tp, b, n]
        parts = list(self._parts(x.shape[0]))
        following: Pending | None = start_all_gather(x[parts[0]], self.tp)
        for i, part in enumerate(parts):
            current, following = following, None
            if i + 1 < len(parts):
                following = start_all_gather(x[parts[i + 1]], self.tp)
            assert current is not None
            rows = current.wait().unflatten(0, (self.tp.size, -1))  # [tp, c, b, k]
            _multiply(rows, matrix, bias, y_by_rank[:, part])
        return y

    def _multiply_and_sum(self, x: Tensor, matrix: Tensor, bias: Tensor | None) -> PendingParts:
        """Compute ``x matrix + bias`` summed over tp: ``[s, b, k]``, ``[k, n]`` -> ``[s(/tp), b, n]``."""
        x = x.contiguous()
        if not self.sequence_parallel:
            y = x.new_empty(*x.shape[:-1], matrix.shape[1])
            pending = []
            for part in self._parts(x.shape[0]):
                _multiply(x[None, part], matrix, bias, y[None, part])
                pending.append(start_all_reduce(y[part], self.tp))
            return PendingParts(y, pending)
        x_by_rank = x.unflatten(0, (self.tp.size, -1))  # [tp, s/tp, b, k]
        y = x.new_empty(*x_by_rank.shape[1:-1], matrix.shape[1])
        pending = []
        for part in self._parts(len(y)):
            rows = x_by_rank[:, part]  # [tp, c, b, k]
            product = x.new_empty(*rows.shape[:-1], matrix.shape[1])
            _multiply(rows, matrix, bias, product)
            pending.append(flat_reduce_scatter(y[part].view(-1), product.view(-1), self.tp))
        return PendingParts(y, pending)

    def _parts(self, num_positions: int) -> Iterator[slice]:
        """Split positions into parts whose sizes differ by at most 1."""
        num_parts = max(1, min(self.num_chunks, num_positions))
        ends = [num_positions * i // num_parts for i in range(num_parts + 1)]
        return (slice(start, end) for start, end in itertools.pairwise(ends))


def _multiply(x: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write ``x matrix + bias`` to `out`: ``[r, c, b, k]`` and ``[k, n]`` -> ``[r, c, b, n]``."""
    rows, y = x.flatten(1, -2), out.flatten(1, -2)  # views: c and b are adjacent in memory
    matrices = matrix.expand(len(x), -1, -1)
    if bias is None:
        torch.bmm(rows, matrices, out=y)
    else:
        torch.baddbmm(bias.detach(), rows, matrices, out=y)


class SymmetricMemoryCollectives(SeparateCollectives):
    """Collectives fused with GEMMs: torch's operators on symmetric memory of other GPUs.

    An operator splits the tokens by rank. It copies a slice while it multiplies another, on two streams, so
    it needs more than one connection (`cuda_environment.settings_for`). Only with sequence parallelism.
    """

    @property
    def splits_column_gemm(self) -> bool:
        """Return True: the operator has no epilogue."""
        return True

    def forward_of_gathered(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Gather and multiply."""
        _, y = torch_private.all_gather_gemm(x.contiguous(), weight.detach().t(), self.tp.group)
        return y if bias is None else y.add_(bias.detach())

    def summed_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply and sum; the operator has no bias."""
        assert bias is None, "a row layer adds its bias to the sum"
        return torch_private.gemm_reduce_scatter(x.contiguous(), weight.detach().t(), self.tp.group)

    def input_gradient_of_gathered(self, grad: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Gather and multiply."""
        gathered, x_grad = torch_private.all_gather_gemm(
            grad.contiguous(), weight, self.tp.group, keeps_gathered=True
        )
        assert gathered is not None
        return x_grad, gathered

    def start_summed_input_gradient(
        self, grad: Tensor, weight: Tensor, scales: tuple[Tensor, Tensor] | None
    ) -> PendingSum:
        """Multiply and sum."""
        return Pending(torch_private.gemm_reduce_scatter(grad.contiguous(), weight, self.tp.group), None)


COLLECTIVES: Mapping[TpCommOverlapMethod | None, type[SeparateCollectives]] = {
    None: SeparateCollectives,
    "chunks": ChunkedCollectives,
    "symmetric_memory": SymmetricMemoryCollectives,
}
"""Kinds of collectives by `Overlap.method`."""


_TRIAL_TOKENS, _TRIAL_FEATURES = 16, 64
"""Tokens of a rank, and features, in the trial of symmetric memory."""
_TOLERANCE = 2.0**-6
"""Largest error of the trial, relative to the largest magnitude: a few roundings to bf16."""


@dataclass(frozen=True)
class Overlap:
    """Overlap of a tensor-parallel group's collectives with GEMMs.

    Attributes:
        method: None to run each collective alone, before or after its GEMM.
        num_chunks: with the method chunks, number of parts that a microbatch's positions are split into.
        reason: why this form was chosen, for the log.
    """

    method: TpCommOverlapMethod | None = None
    num_chunks: int = 1
    reason: str = ""

    @property
    def description(self) -> str:
        """Return the form and the reason, for the log."""
        texts = {
            None: "run before or after their GEMMs",
            "chunks": f"overlap with their GEMMs in {self.num_chunks} parts of the positions",
            "symmetric_memory": "overlap with their GEMMs in torch's symmetric memory",
        }
        return f"{texts[self.method]} ({self.reason})"


SEPARATE = Overlap()
"""No overlap."""


def choose_overlap(
    parallel: ParallelConfig,
    topology: Topology,
    num_tokens: int,
    dtype: torch.dtype,
    fp8: Fp8Options | None = None,
) -> Overlap:
    """Return how this run overlaps; every rank must call it.

    Args:
        num_tokens: tokens of a microbatch.
        fp8: options of the layers' GEMMs in 8 or 4 bits; None in other runs.
    """
    num_chunks = parallel.tp_comm_chunks(num_tokens, topology.device.type)
    if topology.tp.size == 1:
        return Overlap(reason="--tp 1")
    if fp8 is not None and not fp8.splits_gemms:
        return Overlap(reason=f"GEMMs of --fp8-recipe {fp8.fp8_recipe} are not split into parts")
    if num_chunks == 1:
        return Overlap(reason=parallel.why_tp_comm_is_not_split(num_tokens, topology.device.type))
    if parallel.tp_comm_overlap_method == "chunks":
        return Overlap("chunks", num_chunks, f"{num_tokens} tokens in a microbatch")
    if not parallel.sequence_parallel:
        problem = "torch has no such operator for the all-reduces without --sequence-parallel"
    else:
        problem = _problem_of_symmetric_memory(topology.tp, topology.device, dtype)
    if problem:
        return Overlap("chunks", num_chunks, f"not in symmetric memory: {problem}")
    return Overlap("symmetric_memory", reason="the GPUs of the group access each other's memory")


def _problem_of_symmetric_memory(tp: Axis, device: torch.device, dtype: torch.dtype) -> str:
    """Return why a tensor-parallel group cannot use symmetric memory, or an empty string.

    All ranks of the group return the same problem.
    """
    if device.type != "cuda":
        return f"the ranks run on {device.type}, and it needs GPUs"
    places = tp.gather_objects((socket.gethostname(), torch.cuda.current_device()), "the places of GPUs")
    if len({host for host, _ in places}) > 1:
        return "the group spans several nodes"
    if len({number for _, number in places}) < tp.size:
        return "each rank sees only its own GPU (CUDA_VISIBLE_DEVICES)"
    others = [number for _, number in places if number != device.index]
    if all(torch.cuda.can_device_access_peer(device, number) for number in others):
        problem = trial_problem(tp, device, dtype)
    else:
        problem = "a GPU cannot access another"
    return next(filter(None, tp.gather_objects(problem, "problems of symmetric memory")), "")


def trial_problem(tp: Axis, device: torch.device, dtype: torch.dtype) -> str:
    """Run both operators on small tensors, and return how they differ from GEMM and collective."""
    generator = torch.Generator().manual_seed(0)  # the same numbers on every rank
    shape = (tp.size * _TRIAL_TOKENS, 1, _TRIAL_FEATURES)
    x = torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)
    matrix = torch.randn(_TRIAL_FEATURES, _TRIAL_FEATURES, generator=generator, dtype=torch.float64)
    matrix = matrix.to(device, dtype)
    try:
        own = x.chunk(tp.size)[tp.rank].contiguous()
        gathered, y = torch_private.all_gather_gemm(own, matrix, tp.group, keeps_gathered=True)
        total = torch_private.gemm_reduce_scatter(x, matrix, tp.group)
    except (RuntimeError, ValueError, NotImplementedError, AttributeError) as error:
        return f"torch {torch.__version__} cannot: {str(error).splitlines()[0]}"
    product = x.double() @ matrix.double()
    own_sum = tp.size * product.chunk(tp.size)[tp.rank]
    assert gathered is not None
    pairs = {"the gathered input": (gathered, x), "the product": (y, product), "the sum": (total, own_sum)}
    differing = [name for name, (found, expected) in pairs.items() if not _is_close(found, expected)]
    return f"{' and '.join(differing)} of a trial differ from GEMM and collective" if differing else ""


def _is_close(found: Tensor, expected: Tensor) -> bool:
    error = (found.double() - expected.double()).abs().max()
    return bool(error <= _TOLERANCE * expected.abs().max())
