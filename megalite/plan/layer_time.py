"""Estimate the time of one microbatch on one rank: GEMMs, attention, and units of the model by record."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import add
from typing import Literal, NamedTuple

from megalite.config.parallel import CP_COMM_PROPERTIES
from megalite.hardware.gpus import Gpu
from megalite.observe.unit_record import (
    AttentionCall,
    CollectiveCall,
    GemmCall,
    Phase,
    PhaseRecord,
    UnitRecord,
)
from megalite.plan.communication import CONTENTION, Group, cp_seconds, ep_seconds, recurrent_cp_seconds
from megalite.plan.planned_run import PlannedRun
from megalite.plan.recurrence_time import recurrence_seconds
from megalite.plan.saved_activations import group_bytes

LAUNCH_SECONDS = 7e-6
"""Host time per kernel."""
OPERATOR_SECONDS = 4.7e-6
"""Host time per operator, with operators that launch no kernel, such as views. The host runs ahead of the
GPU, so only shorter kernels wait for it."""


class WorkSeconds(NamedTuple):
    """Seconds of a piece of work on one rank, by kind. The kinds do not overlap.

    Attributes:
        gemms: GEMMs outside of attention.
        attention: core attention, including softmax.
        memory_bound: memory-bound kernels: norms, activations, additions, the optimizer; and recurrences.
        tp: waiting for tensor-parallel communication.
        dp: waiting for data-parallel communication.
        pp: waiting for messages between stages.
        launch: waiting for the host, which launches the kernels.
        offload: waiting for offloaded activations, or for the host's update of offloaded optimizer state.
        cp: waiting for context-parallel communication.
        ep: waiting for the messages of expert parallelism.
    """

    gemms: float = 0.0
    attention: float = 0.0
    memory_bound: float = 0.0
    tp: float = 0.0
    dp: float = 0.0
    pp: float = 0.0
    launch: float = 0.0
    offload: float = 0.0
    cp: float = 0.0
    ep: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(self)

    def __add__(self, other: WorkSeconds) -> WorkSeconds:  # type: ignore[override]
        return WorkSeconds(*map(add, self, other))

    def __mul__(self, factor: float) -> WorkSeconds:  # type: ignore[override]
        return WorkSeconds(*(value * factor for value in self))


NO_WORK = WorkSeconds()


def total_work(works: Iterable[WorkSeconds]) -> WorkSeconds:
    """Return the sum of several pieces of work, one after the other."""
    return sum(works, NO_WORK)


@dataclass(frozen=True)
class MicrobatchWork:
    """Work of one microbatch: forward, input gradient, and weight gradients."""

    forward: WorkSeconds = NO_WORK
    backward_input: WorkSeconds = NO_WORK
    backward_weight: WorkSeconds = NO_WORK

    def __add__(self, other: MicrobatchWork) -> MicrobatchWork:
        return MicrobatchWork(
            self.forward + other.forward,
            self.backward_input + other.backward_input,
            self.backward_weight + other.backward_weight,
        )

    def __mul__(self, factor: float) -> MicrobatchWork:
        return MicrobatchWork(
            self.forward * factor, self.backward_input * factor, self.backward_weight * factor
        )

    @property
    def backward(self) -> WorkSeconds:
        return self.backward_input + self.backward_weight

    @property
    def seconds(self) -> float:
        return self.forward.seconds + self.backward_input.seconds + self.backward_weight.seconds


TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (128, 64, 0.75), (64, 64, 0.55))
"""Rows and columns of a streaming multiprocessor's output tile, and its share of the best rate. A small tile
reads its inputs more often."""
FILL_SECONDS = 0.8e-6
"""Latency until a tile's first operands arrive from GPU memory."""
ALIGNED, WHOLE_LINES = 8, 64
"""Elements in 16 bytes, and in a cache line of 128 bytes."""
UNALIGNED_RATE, BROKEN_LINE_RATE = 0.20, 0.80
"""Share of the rate if rows do not start at a multiple of 16 bytes, and if they do not start at a cache
line."""
KERNEL_SECONDS = 4e-6
"""Time from the end of a kernel until the next one runs at full speed."""


@lru_cache(maxsize=4096)
def gemm_seconds(gpu: Gpu, m: int, n: int, k: int, batch: int = 1, element_bytes: int = 2) -> float:
    """Return the seconds of ``batch`` GEMMs ``[m, k] x [k, n]``.

    Tiles of the output are distributed over the multiprocessors in waves, and the last wave takes as long as
    a full one. The library selects the fastest of several tile sizes. Memory bandwidth is a lower bound.
    """
    full = gpu.tflops * 1e12 * gpu.product_share * alignment_rate(n, k) * dtype_rate(element_bytes)
    candidates = []
    for rows, columns, share in TILES:
        waves = math.ceil(math.ceil(m / rows) * math.ceil(n / columns) * batch / gpu.num_sms)
        multiplying = 2 * rows * columns * k * gpu.num_sms / (full * share)
        candidates.append(waves * (multiplying + _tile_overhead(gpu, rows * columns * element_bytes)))
    moved = element_bytes * batch * (m * k + k * n + m * n)
    return max(min(candidates), moved / memory_bandwidth(gpu)) + KERNEL_SECONDS


def _tile_overhead(gpu: Gpu, num_bytes: int) -> float:
    """Return the seconds at the start and end of a tile in which its multiprocessor multiplies nothing.

    It waits for the first operands, and writes the tile's `num_bytes` with its share of the memory bandwidth.
    """
    return FILL_SECONDS + num_bytes * gpu.num_sms / memory_bandwidth(gpu)


def alignment_rate(*row_lengths: int) -> float:
    """Return the share of the rate that rows of these lengths reach; the worst row length decides."""
    if any(length % ALIGNED for length in row_lengths):
        return UNALIGNED_RATE
    return BROKEN_LINE_RATE if any(length % WHOLE_LINES for length in row_lengths) else 1.0


def dtype_rate(element_bytes: int) -> float:
    """Return the rate relative to the 16-bit rate: half for 32 bits (TF32), very little for 64 bits."""
    return {2: 1.0, 4: 0.5}.get(element_bytes, 0.06)


def memory_bandwidth(gpu: Gpu) -> float:
    """Return the bytes per second that programs reach in GPU memory."""
    return gpu.memory_gbps * 1e9 * gpu.memory_share


def memory_seconds(run: PlannedRun, num_bytes: float) -> float:
    """Return the seconds to read or write this many bytes of GPU memory."""
    return num_bytes / memory_bandwidth(run.cluster.gpu)


SCORES_IN_FORWARD, SCORES_IN_BACKWARD = 4.5, 6.0
"""Unfused attention: how often the scores are read or written outside of GEMMs, for bias, softmax, dropout
and its mask."""
FUSED_BACKWARD = 2.5
"""Fused attention: ratio of backward GEMMs to forward GEMMs. Backward recomputes the forward."""
SHORT_LENGTH = 512
"""Sequence length at which fused attention has half of its rate. On an H100 with heads of 128,
FlashAttention-2 has 191, 260, 298, 319, 333 and 335 TFLOP/s with 512, 1k, 2k, 4k, 8k and 16k causal positions
in forward, and 214 to 322 in backward (Shah et al. 2024, arXiv 2407.08608, figures 5 and 6)."""
CUDNN_GAIN = 1.6
"""Ratio of cuDNN's rate to FlashAttention-2's on Hopper: 484 to 298 TFLOP/s with 2k causal positions in
forward, 465 to 291 in backward (the same figures)."""
TRITON_BACKWARD, TRITON_BACKWARD_LARGE = 3.5, 4.0
"""megalite's own attention: ratio of backward GEMMs to forward GEMMs. Both backward kernels compute the
scores and the gradients of the attention weights (kernels/triton_attention.py). With heads above
`SMALL_HEAD`, the gradients of values are a third kernel, which computes the scores too."""
SMALL_HEAD = 128
"""Largest head for which one kernel computes the gradients of keys and values."""
DROPOUT_INSTRUCTIONS = {
    SMALL_HEAD: {"forward": 23.0, "key_gradients": 30.9, "query_gradients": 24.2},
    256: {"forward": 23.5, "key_gradients": 34.6, "query_gradients": 29.1, "value_gradients": 26.6},
}
"""Instructions per score that dropout adds to the inner loops of megalite's own attention, by the largest
head size: a Philox block for four scores, and the mask. From the machine code for Hopper at these head sizes
(benchmarks/MACHINE_CODE.md). A multiprocessor runs one program of each kernel at a time, so nothing hides
them. The GEMMs are assumed to be as fast as FlashAttention-2's."""
LANE_RATE = 128 * 1.7e9
"""Instructions of a thread per second and multiprocessor: 4 x 32 lanes at the clock of a busy Hopper GPU. An
A100 has 1.4 GHz."""


def attention_seconds(run: PlannedRun, call: AttentionCall) -> float:
    """Return the seconds of a call of core attention."""
    if not run.program.fused_attention:
        return _unfused_attention(run, call)
    program = run.program
    comm_type = call.cp_comm_type
    in_blocks = program.is_own and comm_type is not None and CP_COMM_PROPERTIES[comm_type].is_zigzag
    kernel: FusedKernel = "cudnn" if program.cudnn_attention and not in_blocks else "flash"
    if (program.triton_blocks and in_blocks) or (program.triton_attention and call.kernel == "triton"):
        kernel = "triton"
    forward, backward = fused_attention_seconds(
        run.cluster.gpu,
        kernel,
        call.scores,
        call.keys,
        (call.size + call.value_size) / 2,
        dropout=call.dropout,
    )
    return program.attention_slowdown * (backward if call.is_backward else forward)


FusedKernel = Literal["flash", "cudnn", "triton"]
"""Kernels of fused attention: FlashAttention-2, cuDNN, and megalite's own in Triton."""


def fused_attention_seconds(
    gpu: Gpu, kernel: FusedKernel, scores: float, keys: int, size: float, *, dropout: bool = False
) -> tuple[float, float]:
    """Return the seconds of fused attention in forward and backward, with all helper kernels.

    Small heads and short samples do not reach the full rate.

    Args:
        scores: number of attention scores: samples x heads x queries x keys, half of them if causal.
        keys: number of keys of a query.
        size: size of a head, in the mean over keys and values.
        dropout: Triton's kernels drop attention weights.
    """
    full_rate = gpu.tflops * 1e12 * gpu.attention_share
    rate = full_rate * min(1.0, (size + 64) / 192) * keys / (keys + SHORT_LENGTH)
    if kernel == "triton":
        gemms, is_small = 4 * size * scores / rate, size <= SMALL_HEAD
        forward, *backward = (
            dropout * scores * instructions / (gpu.num_sms * LANE_RATE)
            for instructions in DROPOUT_INSTRUCTIONS[SMALL_HEAD if is_small else 256].values()
        )
        factor = TRITON_BACKWARD if is_small else TRITON_BACKWARD_LARGE
        return gemms + forward, factor * gemms + sum(backward)
    if kernel == "cudnn" and gpu.has_cudnn_attention:
        rate *= CUDNN_GAIN
    seconds = 4 * size * scores / rate
    return seconds, FUSED_BACKWARD * seconds


def _unfused_attention(run: PlannedRun, call: AttentionCall) -> float:
    """Count a batched GEMM for the scores, softmax, and a GEMM for the context; backward has two for each."""
    gpu, size = run.cluster.gpu, run.element_bytes
    gemms = gemm_seconds(gpu, call.queries, call.keys, call.size, call.heads, size)
    gemms += gemm_seconds(gpu, call.queries, call.value_size, call.keys, call.heads, size)
    scores = memory_seconds(run, call.heads * call.queries * call.keys * size)
    if call.is_backward:
        return 2 * gemms + SCORES_IN_BACKWARD * scores
    return gemms + SCORES_IN_FORWARD * scores


def unit_work(run: PlannedRun, unit: UnitRecord) -> MicrobatchWork:
    """Return the work of a unit, without full recomputation."""
    forward = phase_work(run, unit.forward, "forward")
    backward = phase_work(run, unit.backward, "backward")
    weight = phase_work(run, unit.weight, "weight")
    return MicrobatchWork(forward, backward, weight + WorkSeconds(memory_bound=_accumulation(run, unit)))


def phase_work(run: PlannedRun, phase: PhaseRecord, name: Phase) -> WorkSeconds:
    """Return the work of one phase of a unit."""
    attention = [attention_seconds(run, call) for call in phase.attention]
    work = WorkSeconds(
        gemms=sum(_gemm(run, gemm) for gemm in phase.gemms),
        attention=sum(attention),
        memory_bound=memory_seconds(run, phase.kernel_bytes) + _recurrences(run, phase),
        tp=sum(tp_seconds(run, phase, name)),
        cp=sum(cp_seconds(run, *each) for each in zip(phase.attention, attention, strict=True))
        + recurrent_cp_seconds(run, phase),
        ep=ep_seconds(run, phase),
    )
    return work._replace(launch=max(0.0, phase.num_operators * OPERATOR_SECONDS - work.seconds))


def _recurrences(run: PlannedRun, phase: PhaseRecord) -> float:
    gpu = run.cluster.gpu
    return sum(recurrence_seconds(gpu, call, memory_bandwidth(gpu)) for call in phase.recurrences)


def _gemm(run: PlannedRun, gemm: GemmCall) -> float:
    return gemm_seconds(run.cluster.gpu, gemm.m, gemm.n, gemm.k, gemm.batch, gemm.element_bytes)


def _accumulation(run: PlannedRun, unit: UnitRecord) -> float:
    """Return the seconds to add gradients to their sums, except for weights whose GEMMs do that."""
    count = sum(weight.size for weight in unit.weights)
    if run.program.fused_accumulation and run.config.parallel.gradient_accumulation_fusion:
        gemms = (*unit.backward.gemms, *unit.weight.gemms)
        added = sum(gemm.m * gemm.n * gemm.batch for gemm in gemms if gemm.adds)
        count = max(0, count - added)  # a loss in chunks adds several times to the same sum
    return memory_seconds(run, (run.element_bytes + _sum_bytes(run)) * count)


def _sum_bytes(run: PlannedRun) -> int:
    """Return the bytes per element to read and write the sum that a microbatch's gradient is added to.

    With one microbatch, or with a reduction after each one (ZeRO 2 and 3), the gradient is only copied.
    """
    size = 2 if run.program.gradient_bytes == 2 else max(run.element_bytes, 4)
    is_copied = run.num_microbatches == 1 or run.zero_stage >= 2
    return size if is_copied else 2 * size


def tp_seconds(run: PlannedRun, phase: PhaseRecord, name: Phase) -> list[float]:
    """Return the seconds by which each tensor-parallel collective of a phase lengthens it.

    An all-gather that has another GEMM before the one that reads its result costs nothing. Unless the weight
    gradients are computed later, their GEMMs hide a part of the other collectives in backward.
    """
    program, is_split = run.program, run.splits_backward
    hidden = program.tp_hidden_share if name == "backward" and not is_split else 0.0
    return [
        0.0
        if each.is_hidden or each.call.kind == "all-to-all" or each.call.is_over_experts  # other axes
        else _overlapped_collective(run, phase.gemms[each.gemm], each.call, name, hidden)
        if each.gemm is not None and run.tp_comm_chunks > 1
        else (1 - hidden) * program.tp_share * _collective_seconds(run, each.call)
        for each in phase.collectives
    ]


def _overlapped_collective(
    run: PlannedRun, gemm: GemmCall, call: CollectiveCall, name: Phase, hidden: float
) -> float:
    """Return the seconds of a collective that overlaps in parts with its GEMM, if it does in this phase."""
    sums, is_symmetric = call.kind != "all-gather", run.config.parallel.requests_symmetric_memory
    if name == "backward" and sums and is_symmetric and not run.splits_backward:
        return 0.0  # the GEMM of the weight's gradient hides it
    in_parts = name == "forward" or (name == "backward" and (run.splits_backward if sums else is_symmetric))
    if in_parts:
        return _overlapped_seconds(run, gemm, call)
    return (1 - hidden) * run.program.tp_share * _collective_seconds(run, call)


def _collective_seconds(run: PlannedRun, call: CollectiveCall, num_calls: int = 1) -> float:
    group = Group(run.cluster, run.tp, 1)
    if call.kind == "all-reduce":
        return group.reduce_seconds(call.num_bytes, num_calls)
    return group.gather_seconds(call.num_bytes, num_calls)


def _overlapped_seconds(run: PlannedRun, gemm: GemmCall, call: CollectiveCall) -> float:
    """Return how much longer a GEMM and its collective take than the GEMM alone if they overlap in parts."""
    alone = _gemm(run, gemm)
    if run.config.parallel.requests_symmetric_memory:
        # torch multiplies the slices of all ranks on two streams, so they fill the multiprocessors like one
        # GEMM. Copies take none, and a rank need not copy its own slice.
        message = Group(run.cluster, run.tp, 1).message_seconds(call.num_bytes / run.tp)
        return (run.tp - 1) * max(0.0, message - alone / run.tp)
    num_chunks = run.tp_comm_chunks
    batch = run.tp if run.config.parallel.sequence_parallel else 1
    part = _gemm(run, gemm._replace(m=math.ceil(gemm.m / (num_chunks * batch)), batch=batch))
    return overlapped_seconds(
        alone, part, _collective_seconds(run, call, num_chunks) / num_chunks, num_chunks
    )


def overlapped_seconds(gemm: float, part: float, communication: float, num_parts: int) -> float:
    """Return the seconds by which communication lengthens a GEMM if both overlap in equal parts.

    Each part takes two steps on two machines, the GPU and the link. The steps of equal parts take the first
    step of one part, the longer step of all others, and the last step (Johnson 1954). Overlapped parts share
    the GPU.

    Args:
        gemm: seconds of the whole GEMM.
        part: seconds of the GEMM of a part.
        communication: seconds of the communication of a part.
    """
    seconds = part + communication + (num_parts - 1) * max(part, communication)
    hidden = num_parts * (part + communication) - seconds
    return seconds - gemm + CONTENTION * hidden


class ModelWork(NamedTuple):
    """Work of a model's units.

    Attributes:
        layers: of each kind of layer.
        last_gemms: a layer's last GEMM and its collective, of each kind of layer.
    """

    embedding: MicrobatchWork
    head: MicrobatchWork
    layers: Mapping[int, MicrobatchWork]
    last_gemms: Mapping[int, WorkSeconds]


def model_work(run: PlannedRun) -> ModelWork:
    """Return the work of a run's units. Runs with the same records and settings of communication share it."""
    units = run.units
    return units.shared(
        ("work", *work_key(run)),
        lambda: ModelWork(
            unit_work(run, units.embedding),
            unit_work(run, units.head),
            {kind: unit_work(run, layer) for kind, layer in units.layers.items()},
            {kind: _last_gemm(run, layer) for kind, layer in units.layers.items()},
        ),
    )


def work_key(run: PlannedRun) -> tuple[Hashable, ...]:
    """Return the settings of a run on which the work of its units depends, besides their records."""
    parallel = run.config.parallel
    return (
        run.cluster,
        run.tp_comm_chunks,
        parallel.requests_symmetric_memory,
        parallel.gradient_accumulation_fusion,
        _sum_bytes(run),
    )


def recomputation(run: PlannedRun, kinds: Sequence[int], work: ModelWork) -> WorkSeconds:
    """Return the work of whole layers that a stage recomputes for one microbatch.

    Args:
        kinds: kinds of the stage's layers.
    """
    groups = [group for group, is_again in run.config.recompute.groups(len(kinds)) if is_again]
    again = Counter(kinds[i] for group in groups for i in group)
    seconds = total_work(work.layers[kind].forward * count for kind, count in again.items())
    if run.program.stops_recomputing:
        last = Counter(kinds[group.stop - 1] for group in groups)
        seconds += total_work(work.last_gemms[kind] * -count for kind, count in last.items())
    return seconds


def _last_gemm(run: PlannedRun, layer: UnitRecord) -> WorkSeconds:
    """Return the work of a layer's last GEMM and its collective."""
    phase, last = layer.forward, len(layer.forward.gemms) - 1
    tp = zip(phase.collectives, tp_seconds(run, phase, "forward"), strict=True)
    return WorkSeconds(
        _gemm(run, phase.gemms[last]),
        tp=sum(seconds for each, seconds in tp if each.gemm == last),
    )


def offload_work(
    run: PlannedRun, kinds: Sequence[int], works: Mapping[int, MicrobatchWork]
) -> tuple[WorkSeconds, WorkSeconds]:
    """Return how long a stage's forward and backward of one microbatch wait for copies of activations.

    A group's copies overlap with the next group's computation, in the order of forward or backward. If all
    groups are offloaded, nothing overlaps with the last group's copies back to the GPU.

    Args:
        kinds: kinds of the stage's layers.
        works: work of each kind of layer.
    """
    recompute, gpu = run.config.recompute, run.cluster.gpu
    if recompute.cpu_offload_activations == 0:
        return WorkSeconds(), WorkSeconds()
    bandwidth = gpu.host_link_bandwidth * gpu.link_share
    groups = recompute.groups(len(kinds))
    down = up = 0.0
    for (group, is_again), size in zip(groups, group_bytes(run, kinds), strict=True):
        if group.start >= recompute.cpu_offload_activations:
            break
        seconds = size / bandwidth
        forward = sum(works[kinds[i]].forward.seconds for i in group)
        backward = sum(works[kinds[i]].backward.seconds for i in group) + (forward if is_again else 0.0)
        is_first_in_backward = group.stop == len(kinds)
        down += max(0.0, seconds - forward)
        up += max(0.0, seconds - (0.0 if is_first_in_backward else backward))
    return WorkSeconds(offload=down), WorkSeconds(offload=up)
