"""Choose how tensor-parallel collectives overlap with the GEMMs next to them, for `gemm_collectives`."""

from __future__ import annotations

import socket
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megalite import torch_private
from megalite.config import ParallelConfig
from megalite.config.parallel import TpCommOverlapMethod
from megalite.distributed.axis import Axis
from megalite.distributed.topology import Topology

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
    parallel: ParallelConfig, topology: Topology, num_tokens: int, dtype: torch.dtype, *, is_fp8: bool
) -> Overlap:
    """Return how this run overlaps; every rank must call it.

    Args:
        num_tokens: tokens of a microbatch.
        dtype: dtype of the activations.
        is_fp8: whether the layers' GEMMs have 8 bits.
    """
    num_chunks = parallel.tp_comm_chunks(num_tokens, topology.device.type)
    if topology.tp.size == 1:
        return Overlap(reason="--tp 1")
    if is_fp8:
        return Overlap(reason="an FP8 operand is scaled by its largest magnitude over all tokens")
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
    places: list[tuple[str, int]] = [("", 0)] * tp.size
    dist.all_gather_object(places, (socket.gethostname(), torch.cuda.current_device()), group=tp.group)
    if len({host for host, _ in places}) > 1:
        return "the group spans several nodes"
    if len({number for _, number in places}) < tp.size:
        return "each rank sees only its own GPU (CUDA_VISIBLE_DEVICES)"
    problem = "" if _accesses_all(device, [number for _, number in places]) else "a GPU cannot access another"
    if not problem:
        problem = trial_problem(tp, device, dtype)
    return _first_problem(problem, tp)


def _accesses_all(device: torch.device, numbers: list[int]) -> bool:
    others = (number for number in numbers if number != device.index)
    return all(torch.cuda.can_device_access_peer(device, number) for number in others)


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


def _first_problem(problem: str, tp: Axis) -> str:
    """Return the first rank's problem on every rank of the group."""
    problems = [""] * tp.size
    dist.all_gather_object(problems, problem, group=tp.group)
    return next(filter(None, problems), "")
