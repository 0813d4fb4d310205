"""Time of the attention product on one rank, written out or fused."""

from __future__ import annotations

from megalite.plan.job import Job
from megalite.plan.products import product_seconds

FORWARD_PASSES, BACKWARD_PASSES = 4.5, 6.0
"""Of the written-out product: times that the scores go to or from memory beside its matrix products: bias and
softmax, dropout and its mask."""
FUSED_BACKWARD = 2.5
"""Of the fused one: products of its backward over those of its forward, which it makes again."""

SHORT_LENGTH = 512
"""Positions at which the fused product has half of its rate. On an H100 with heads of 128, FlashAttention-2
makes 191, 260, 298, 319, 333 and 335 TFLOP/s of 512, 1k, 2k, 4k, 8k and 16k causal positions in forward,
and 214 to 322 in backward (Shah et al. 2024, arXiv 2407.08608, figures 5 and 6)."""
CUDNN_GAIN = 1.6
"""Rate of cuDNN's fused product over FlashAttention-2's on Hopper: 484 TFLOP/s of 2k causal positions in
forward to 298, 465 to 291 in backward (the same figures)."""
HOPPER_TFLOPS = 900
"""Of a GPU that has the instructions which cuDNN gains by."""


def attention_seconds(job: Job) -> tuple[float, float]:
    """Forward and backward of one layer and microbatch."""
    return _fused(job) if job.program.fused_attention else _written_out(job)


def _sizes(job: Job) -> tuple[int, int, int, int]:
    """Samples x heads of a rank, queries, keys, and the size of a head."""
    model = job.config.model
    heads = job.config.training.micro_batch_size * model.num_attention_heads // job.tp
    return max(heads, 1), model.seq_length // job.cp, model.seq_length, model.head_dim


def _fused(job: Job) -> tuple[float, float]:
    """Return the seconds of half of the scores. Small heads and short samples do not reach the full rate."""
    heads, queries, keys, size = _sizes(job)
    gpu = job.cluster.gpu
    operations = 4 * heads * queries * keys * size / 2
    rate = gpu.tflops * 1e12 * gpu.attention_share * min(1.0, (size + 64) / 192)
    rate *= keys / (keys + SHORT_LENGTH)
    if job.program.cudnn_attention and gpu.tflops > HOPPER_TFLOPS:
        rate *= CUDNN_GAIN
    seconds = operations / rate
    return seconds, FUSED_BACKWARD * seconds


def _written_out(job: Job) -> tuple[float, float]:
    """Scores by one batched product, softmax, context by another; backward makes each product's two."""
    heads, queries, keys, size = _sizes(job)
    gpu, element = job.cluster.gpu, job.element_bytes
    scores = product_seconds(gpu, queries, keys, size, heads, element)
    context = product_seconds(gpu, queries, size, keys, heads, element)
    forward = scores + context
    through_memory = heads * queries * keys * element / (gpu.memory_gbps * 1e9 * gpu.memory_share)
    return forward + FORWARD_PASSES * through_memory, 2 * forward + BACKWARD_PASSES * through_memory
