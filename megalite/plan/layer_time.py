"""Estimate the time of one microbatch on one rank: GEMMs, attention, a layer, and the model's ends."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from megalite.hardware.gpus import Gpu
from megalite.plan.communication import Group
from megalite.plan.model_parameters import layer_parameters_of_rank, table_parameters
from megalite.plan.planned_run import PlannedRun
from megalite.plan.saved_activations import group_elements

LAUNCH_SECONDS = 7e-6
"""Host time per kernel. The host runs ahead of the GPU, so only shorter kernels wait for it."""


@dataclass(frozen=True)
class WorkSeconds:
    """Seconds of a piece of work on one rank, by kind. The kinds do not overlap.

    Attributes:
        gemms: GEMMs outside of attention.
        attention: core attention, including softmax.
        memory_bound: memory-bound kernels: norms, activations, additions, the optimizer.
        tp: waiting for tensor-parallel communication.
        dp: waiting for data-parallel communication.
        pp: waiting for messages between stages.
        launch: waiting for the host, which launches the kernels.
        offload: waiting for offloaded activations, or for the host's update of offloaded optimizer state.
    """

    gemms: float = 0.0
    attention: float = 0.0
    memory_bound: float = 0.0
    tp: float = 0.0
    dp: float = 0.0
    pp: float = 0.0
    launch: float = 0.0
    offload: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(vars(self).values())

    def __add__(self, other: WorkSeconds) -> WorkSeconds:
        return WorkSeconds(
            *(mine + its for mine, its in zip(vars(self).values(), vars(other).values(), strict=True))
        )

    def __mul__(self, factor: float) -> WorkSeconds:
        return WorkSeconds(*(value * factor for value in vars(self).values()))


def total_work(works: Iterable[WorkSeconds]) -> WorkSeconds:
    """Return the sum of several pieces of work, one after the other."""
    return sum(works, WorkSeconds())


@dataclass(frozen=True)
class MicrobatchWork:
    """The work of one microbatch: forward, input gradient, and weight gradients."""

    forward: WorkSeconds = WorkSeconds()
    backward_input: WorkSeconds = WorkSeconds()
    backward_weight: WorkSeconds = WorkSeconds()

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


def _gemm(run: PlannedRun, m: int, n: int, k: int, batch: int = 1) -> float:
    return gemm_seconds(run.cluster.gpu, m, n, k, batch, run.element_bytes)


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
HOPPER_TFLOPS = 900
"""Rate above which a GPU has the instructions that make cuDNN faster."""
TRITON_BACKWARD = 3.5
"""megalite's own attention: ratio of backward GEMMs to forward GEMMs. Both backward kernels compute the
scores and the gradients of the attention weights (kernels/triton_attention.py)."""
DROPOUT_OPERATIONS = 400
"""Cost of an attention weight's random number, in floating-point operations; backward computes it twice.
This is an estimate, since our kernels have not been timed on a GPU: 20 instructions, a quarter of a block of
ten Philox rounds, take 0.31 clocks on the 64 integer lanes of an H100's multiprocessor, which does 418
operations in this time in FlashAttention-2. The GEMMs are assumed to be as fast as FlashAttention-2's."""


def attention_seconds(run: PlannedRun) -> tuple[float, float]:
    """Return the seconds of core attention in forward and backward, for one layer and microbatch."""
    return _fused_attention(run) if run.program.fused_attention else _unfused_attention(run)


def _attention_sizes(run: PlannedRun) -> tuple[int, int, int, int]:
    """Return a rank's samples x heads, number of queries, number of keys, and head size."""
    model = run.config.model
    heads = run.config.training.micro_batch_size * model.num_attention_heads // run.tp
    return max(heads, 1), model.seq_length // run.cp, model.seq_length, model.head_dim


def _fused_attention(run: PlannedRun) -> tuple[float, float]:
    """Count the scores that are computed. Small heads and short samples do not reach the full rate."""
    heads, queries, keys, size = _attention_sizes(run)
    gpu = run.cluster.gpu
    scores = heads * queries * keys / (2 if run.config.model.is_causal else 1)
    full_rate = gpu.tflops * 1e12 * gpu.attention_share
    rate = full_rate * min(1.0, (size + 64) / 192) * keys / (keys + SHORT_LENGTH)
    if run.program.triton_attention:
        gemms, dropout = 4 * size * scores / rate, DROPOUT_OPERATIONS * scores / full_rate
        return gemms + dropout, TRITON_BACKWARD * gemms + 2 * dropout
    if run.program.cudnn_attention and gpu.tflops > HOPPER_TFLOPS:
        rate *= CUDNN_GAIN
    seconds = 4 * size * scores / rate
    return seconds, FUSED_BACKWARD * seconds


def _unfused_attention(run: PlannedRun) -> tuple[float, float]:
    """Count a batched GEMM for the scores, softmax, and a GEMM for the context; backward has two for each."""
    heads, queries, keys, size = _attention_sizes(run)
    gemms = _gemm(run, queries, keys, size, heads) + _gemm(run, queries, size, keys, heads)
    scores = memory_seconds(run, heads * queries * keys * run.element_bytes)
    return gemms + SCORES_IN_FORWARD * scores, 2 * gemms + SCORES_IN_BACKWARD * scores


HIDDEN_ACCESSES = 10.0
"""Reads and writes of the hidden states in a forward: two norms, two additions, dropout."""
FUSED_SHARE = 0.7
"""Share of these accesses that remains with fused kernels."""
INNER_ACCESSES = 2.0
"""Accesses of each element inside a block: one write, one read."""
BACKWARD_ACCESSES = 1.5
"""Ratio of memory accesses in backward to memory accesses in forward."""
KERNELS = 30
"""Kernels of a layer's forward; its backward has one and a half times as many."""


def layer_work(run: PlannedRun) -> MicrobatchWork:
    """Return the work of one layer, without recomputation."""
    shapes = weight_shapes(run)
    # The input gradient needs the same GEMMs as the forward, with the two dims of each weight swapped.
    gemms = sum(_gemm(run, run.tokens, outputs, inputs) for outputs, inputs in shapes)
    weight_gemms = sum(_gemm(run, outputs, inputs, run.tokens) for outputs, inputs in shapes)
    forward_attention, backward_attention = attention_seconds(run)
    memory = memory_seconds(run, _bytes_moved(run))
    tp = run.program.tp_share * _tp_seconds(run)
    forward = WorkSeconds(gemms, forward_attention, memory, tp=tp)
    backward_input = WorkSeconds(
        gemms, backward_attention, BACKWARD_ACCESSES * memory, tp=tp * (1 - run.program.tp_hidden_share)
    )
    return MicrobatchWork(
        _with_launches(forward, KERNELS),
        _with_launches(backward_input, KERNELS),
        _with_launches(WorkSeconds(weight_gemms, memory_bound=_accumulation(run)), KERNELS / 2),
    )


def _with_launches(work: WorkSeconds, num_kernels: float) -> WorkSeconds:
    """Add the time that the GPU waits for the host to launch the kernels."""
    return replace(work, launch=max(0.0, num_kernels * LAUNCH_SECONDS - work.seconds))


def weight_shapes(run: PlannedRun) -> list[tuple[int, int]]:
    """Return the output and input sizes of a layer's weights on one rank."""
    model, tp = run.config.model, run.tp
    heads = model.num_attention_heads * model.head_dim
    qkv = (heads + 2 * model.num_kv_heads * model.head_dim) // tp
    gates = 2 if model.is_gated else 1
    return [
        (qkv, model.hidden_size),
        (model.hidden_size, heads // tp),
        (gates * model.ffn_size // tp, model.hidden_size),
        (model.hidden_size, model.ffn_size // tp),
    ]


def _accumulation(run: PlannedRun) -> float:
    """Return the seconds to add weight gradients to their fp32 sums, unless the GEMMs do that."""
    is_fused = run.program.fused_accumulation and run.config.parallel.gradient_accumulation_fusion
    if is_fused and run.zero_stage != 3:
        return 0.0
    return memory_seconds(run, (run.element_bytes + 8) * layer_parameters_of_rank(run))


def _bytes_moved(run: PlannedRun) -> float:
    """Return the bytes that memory-bound kernels read and write in a layer's forward."""
    model, tp = run.config.model, run.tp
    share = FUSED_SHARE if run.program.fused_elementwise else 1.0
    hidden = share * HIDDEN_ACCESSES * model.hidden_size / run.num_sequence_shards
    widths: float = 2 * (model.num_attention_heads + model.num_kv_heads) * model.head_dim
    widths += (3 if model.is_gated else 2) * model.ffn_size / INNER_ACCESSES
    return run.tokens * run.element_bytes * (hidden + INNER_ACCESSES * widths / tp)


def _tp_seconds(run: PlannedRun) -> float:
    """Count an all-reduce per block, or an all-gather and a reduce-scatter with sequence parallelism."""
    group = Group(run.cluster, run.tp, 1)
    if run.config.parallel.sequence_parallel:
        return 4 * group.gather_seconds(run.hidden_bytes)
    return 2 * group.reduce_seconds(run.hidden_bytes)


def recomputation(run: PlannedRun, layer: MicrobatchWork, num_layers: int) -> WorkSeconds:
    """Return the work that a stage recomputes for one microbatch.

    Args:
        layer: the work of one layer.
        num_layers: number of layers of the stage.
    """
    recompute = run.config.recompute
    if recompute.recompute_granularity == "full":
        again = sum(len(group) for group, is_again in recompute.groups(num_layers) if is_again)
        return layer.forward * again
    return _recomputed_modules(run, layer) * num_layers


def _recomputed_modules(run: PlannedRun, layer: MicrobatchWork) -> WorkSeconds:
    model, modules = run.config.model, run.config.recompute.modules
    element = run.tokens * run.element_bytes
    norm = memory_seconds(run, 2 * INNER_ACCESSES * element * model.hidden_size / run.num_sequence_shards)
    activation = memory_seconds(run, 2 * INNER_ACCESSES * element * model.ffn_size / run.tp)
    work = WorkSeconds()
    if "core_attn" in modules:
        work += WorkSeconds(attention=attention_seconds(run)[0])
    if "layernorm" in modules:
        work += WorkSeconds(memory_bound=norm)
    if "mlp_act" in modules:
        work += WorkSeconds(memory_bound=activation)
    if "mlp" in modules:
        _, _, (outputs, inputs), _ = weight_shapes(run)
        gemm = _gemm(run, run.tokens, outputs, inputs)
        work += WorkSeconds(gemm, memory_bound=norm + activation, tp=layer.forward.tp / 4)
    return work


def offload_work(run: PlannedRun, layer: MicrobatchWork, num_layers: int) -> tuple[WorkSeconds, WorkSeconds]:
    """Return how long a stage's forward and backward of one microbatch wait for copies of activations.

    A group's copies overlap with the next group's computation, in the order of forward or backward. If all
    groups are offloaded, nothing overlaps with the last group's copies back to the GPU.

    Args:
        layer: the work of one layer.
        num_layers: number of layers of the stage.
    """
    recompute, gpu = run.config.recompute, run.cluster.gpu
    bandwidth = gpu.host_link_bandwidth * gpu.link_share
    groups = recompute.groups(num_layers)
    down = up = 0.0
    for (group, is_again), elements in zip(groups, group_elements(run, num_layers), strict=True):
        if group.start >= recompute.cpu_offload_activations:
            break
        seconds = elements * run.element_bytes / bandwidth
        forward = len(group) * layer.forward.seconds
        backward = len(group) * layer.backward.seconds + (forward if is_again else 0.0)
        is_first_in_backward = group.stop == num_layers
        down += max(0.0, seconds - forward)
        up += max(0.0, seconds - (0.0 if is_first_in_backward else backward))
    return WorkSeconds(offload=down), WorkSeconds(offload=up)


def embedding_work(run: PlannedRun) -> MicrobatchWork:
    """Return the work of the embedding: lookup, sum over tp, and the gradient of the table."""
    tp = Group(run.cluster, run.tp, 1).reduce_seconds(run.hidden_bytes)
    table = table_parameters(run.config.model, run.tp) / run.tp
    gradient = memory_seconds(run, 3 * run.hidden_bytes + (run.element_bytes * 2 + 8) * table)
    return MicrobatchWork(
        WorkSeconds(memory_bound=memory_seconds(run, 4 * run.hidden_bytes), tp=tp),
        WorkSeconds(),
        WorkSeconds(memory_bound=gradient),
    )


def head_work(run: PlannedRun) -> MicrobatchWork:
    """Return the work of the output layer and the vocabulary-parallel loss."""
    model = run.config.model
    columns, hidden = model.padded_vocab_size(run.tp) // run.tp, model.hidden_size
    tokens = round(run.tokens * model.predicted_share)
    gemm = _gemm(run, tokens, columns, hidden)
    weight_gemm = _gemm(run, columns, hidden, tokens)
    logits = tokens * columns
    tp = Group(run.cluster, run.tp, 1).reduce_seconds(run.hidden_bytes)
    table = table_parameters(model, run.tp) / run.tp
    accumulation = memory_seconds(run, (run.element_bytes + 8) * table)
    return MicrobatchWork(
        WorkSeconds(gemm, memory_bound=memory_seconds(run, logits * (2 * run.element_bytes + 5 * 4))),
        WorkSeconds(gemm, memory_bound=memory_seconds(run, logits * 3 * 4), tp=tp),
        WorkSeconds(weight_gemm, memory_bound=accumulation),
    )
