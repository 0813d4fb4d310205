"""Estimate the time of a kernel: GEMMs, attention, recurrences, and memory-bound kernels."""

from __future__ import annotations

import math
from functools import lru_cache

from megalite.observe.unit_record import AttentionCall, CastCall, RecurrenceCall
from megalite.plan.planned_run import FusedKernel, PlannedRun
from megalite.utils.hardware.gpus import Gpu

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
def gemm_seconds(gpu: Gpu, m: int, n: int, k: int, batch: int = 1, element_bytes: float = 2) -> float:
    """Return the seconds of ``batch`` GEMMs ``[m, k] x [k, n]``.

    Tiles of the output are distributed over the multiprocessors in waves, and the last wave takes as long as
    a full one. The library selects the fastest of several tile sizes. Memory bandwidth is a lower bound.
    Operands of fewer bits give results of 16 bits.
    """
    full = gpu.tflops * 1e12 * gpu.product_share * alignment_rate(n, k) * dtype_rate(gpu, element_bytes)
    result_bytes = max(2, element_bytes)
    candidates = []
    for rows, columns, share in TILES:
        waves = math.ceil(math.ceil(m / rows) * math.ceil(n / columns) * batch / gpu.num_sms)
        multiplying = 2 * rows * columns * k * gpu.num_sms / (full * share)
        # At its start and end, a tile multiplies nothing: it waits for the first operands, and writes its
        # results with its share of the memory bandwidth.
        written = rows * columns * result_bytes * gpu.num_sms / memory_bandwidth(gpu)
        candidates.append(waves * (multiplying + (FILL_SECONDS + written)))
    moved = batch * (element_bytes * (m * k + k * n) + result_bytes * m * n)
    return max(min(candidates), moved / memory_bandwidth(gpu)) + KERNEL_SECONDS


def alignment_rate(*row_lengths: int) -> float:
    """Return the share of the rate that rows of these lengths reach; the worst row length decides."""
    if any(length % ALIGNED for length in row_lengths):
        return UNALIGNED_RATE
    return BROKEN_LINE_RATE if any(length % WHOLE_LINES for length in row_lengths) else 1.0


def dtype_rate(gpu: Gpu, element_bytes: float) -> float:
    """Return the rate relative to the 16-bit rate: half for 32 bits (TF32), very little for 64 bits.

    A GPU whose rate in 8 or 4 bits is not known has twice the rate of twice the bits.
    """
    in_8_bits = gpu.fp8_tflops / gpu.tflops * (gpu.fp8_share / gpu.product_share or 1.0) or 2.0
    in_4_bits = gpu.fp4_tflops / gpu.tflops * (gpu.fp4_share / gpu.product_share or 1.0) or 2 * in_8_bits
    return {0.5: in_4_bits, 1: in_8_bits, 2: 1.0, 4: 0.5}.get(element_bytes, 0.06)


def memory_bandwidth(gpu: Gpu) -> float:
    """Return the bytes per second that programs reach in GPU memory."""
    return gpu.memory_gbps * 1e9 * gpu.memory_share


def memory_seconds(run: PlannedRun, num_bytes: float) -> float:
    """Return the seconds to read or write this many bytes of GPU memory."""
    return num_bytes / memory_bandwidth(run.cluster.gpu)


CAST_RATE = 0.48
"""Bandwidth of the kernels that round operands of GEMMs or find their largest magnitudes, relative to other
memory-bound kernels: 1.26 and 1.31 TB/s in the two runs with `--fp8` of docs/plan.md, on an H100."""
KERNELS_TO_MEASURE = 2
"""Kernels that find the largest magnitude of a tensor: maxima of parts, and the largest of these."""


def cast_seconds(gpu: Gpu, call: CastCall) -> float:
    """Return the seconds to round an operand of GEMMs, or to find its largest magnitude."""
    num_kernels = KERNELS_TO_MEASURE if call.measures else 1
    return call.num_bytes / (memory_bandwidth(gpu) * CAST_RATE) + num_kernels * KERNEL_SECONDS


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
    kernels = run.kernels
    if kernels.attention == "unfused":
        return _unfused_attention(run, call)
    in_blocks = call.exchange is not None and (call.exchange.gathers_keys or call.exchange.ring_size > 1)
    kernel = kernels.attention_in_blocks if in_blocks else kernels.attention
    if kernels.has_triton and call.kernel == "triton":
        kernel = "triton"
    forward, backward = fused_attention_seconds(
        run.cluster.gpu,
        kernel,
        call.scores,
        call.keys,
        (call.size + call.value_size) / 2,
        dropout=call.dropout,
    )
    return kernels.slowdown * (backward if call.is_backward else forward)


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


FULL_SIZE = 128
"""Key size from which on the GEMMs of a chunk are assumed to be as fast as FlashAttention-2's."""


def recurrence_seconds(gpu: Gpu, call: RecurrenceCall) -> float:
    """Return the seconds of Triton's kernels: of each, the time of its GEMMs or of its memory accesses.

    They have not been measured on a GPU. The kernels that loop over chunks have one program for some columns
    of a head. If there are fewer programs than multiprocessors, the rest of these have nothing to do.
    """
    bandwidth = memory_bandwidth(gpu)
    rate = gpu.tflops * 1e12 * gpu.attention_share * 2 / call.element_bytes
    rate *= min(1.0, (call.key_size + 64) / (FULL_SIZE + 64))
    return sum(
        max(kernel.flops / (rate * min(1.0, kernel.num_programs / gpu.num_sms)), kernel.num_bytes / bandwidth)
        for kernel in call.kernels
    )
