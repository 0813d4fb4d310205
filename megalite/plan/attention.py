"""Time of the attention product on one rank, written out or fused."""

from __future__ import annotations

from megalite.plan.job import Job
from megalite.plan.products import product_seconds

FORWARD_PASSES, BACKWARD_PASSES = 4.5, 6.0
"""Of the written-out product: times that the scores go to or from memory beside its matrix products: bias and
softmax, dropout and its mask."""
FUSED_BACKWARD = 2.5
"""Of the fused one: products of its backward over those of its forward, which it makes again."""


def attention_seconds(job: Job) -> tuple[float, float]:
    """Forward and backward of one layer and microbatch."""
    return _fused(job) if job.program.fused_attention else _written_out(job)


def _sizes(job: Job) -> tuple[int, int, int, int]:
    """Samples x heads of a rank, queries, keys, and the size of a head."""
    model = job.config.model
    heads = job.config.training.micro_batch_size * model.num_attention_heads // job.tp
    return max(heads, 1), model.seq_length // job.cp, model.seq_length, model.head_dim


def _fused(job: Job) -> tuple[float, float]:
    """Half of the scores, the others being masked, at a rate that small heads do not reach."""
    heads, queries, keys, size = _sizes(job)
    gpu = job.cluster.gpu
    operations = 4 * heads * queries * keys * size / 2
    rate = gpu.tflops * 1e12 * gpu.attention_share * min(1.0, (size + 64) / 192)
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
