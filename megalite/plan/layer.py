"""Time of one microbatch through one layer, and through both ends of the model, on one rank.

Shapes: N tokens of a microbatch, h hidden size, q and kv widths of queries and of keys, f of the MLP, t = tp.
"""

from __future__ import annotations

from dataclasses import replace

from megalite.plan.attention import attention_seconds
from megalite.plan.communication import Group
from megalite.plan.job import Job
from megalite.plan.parameters import layer_parameters_of_rank, table_parameters
from megalite.plan.products import product_seconds
from megalite.plan.work import Passes, Work

HIDDEN_PASSES = 10.0
"""Times that a forward pass takes the residual stream to or from memory: two norms, two sums, dropout."""
FUSED_SHARE = 0.7
"""Of those, where few kernels make them."""
INNER_PASSES = 2.0
"""Times for each element that a block has inside: once in, once out."""
BACKWARD_PASSES = 1.5
"""Of a backward over a forward."""
KERNELS = 30
"""Of a layer's forward; its backward has as many again and half."""
LAUNCH_SECONDS = 7e-6
"""Of the processor, for each kernel: it runs ahead of the GPU, and only what is faster waits for it."""


def passes_seconds(job: Job, num_bytes: float) -> float:
    """To take that many bytes to or from memory."""
    gpu = job.cluster.gpu
    return num_bytes / (gpu.memory_gbps * 1e9 * gpu.memory_share)


def layer_passes(job: Job) -> Passes:
    """One layer without recomputation."""
    products = _products(job)
    forward_attention, backward_attention = attention_seconds(job)
    memory = passes_seconds(job, _bytes_moved(job))
    talk = job.program.tp_share * _tp_seconds(job)
    forward = Work(products, forward_attention, memory, tp=talk)
    backward_input = Work(
        products, backward_attention, BACKWARD_PASSES * memory, tp=talk * (1 - job.program.tp_hidden_share)
    )
    return Passes(
        _at_least(forward, KERNELS),
        _at_least(backward_input, KERNELS),
        _at_least(Work(_weight_products(job), passes=_accumulation(job)), KERNELS / 2),
    )


def _at_least(work: Work, num_kernels: float) -> Work:
    """The same, or as long as the processor takes to start it."""
    waits = max(0.0, num_kernels * LAUNCH_SECONDS - work.seconds)
    return replace(work, launch=waits)


def weight_shapes(job: Job) -> list[tuple[int, int]]:
    """Outputs and inputs of a layer's weights on one rank."""
    model, tp = job.config.model, job.tp
    heads = model.num_attention_heads * model.head_dim
    qkv = (heads + 2 * model.num_kv_heads * model.head_dim) // tp
    gates = 2 if model.activation == "swiglu" else 1
    return [
        (qkv, model.hidden_size),
        (model.hidden_size, heads // tp),
        (gates * model.ffn_size // tp, model.hidden_size),
        (model.hidden_size, model.ffn_size // tp),
    ]


def _products(job: Job) -> float:
    """The four of a forward; an input's gradient has the same with the two dims of the weight swapped."""
    return sum(
        product_seconds(job.cluster.gpu, job.tokens, n, k, 1, job.element_bytes)
        for n, k in weight_shapes(job)
    )


def _weight_products(job: Job) -> float:
    return sum(
        product_seconds(job.cluster.gpu, n, k, job.tokens, 1, job.element_bytes)
        for n, k in weight_shapes(job)
    )


def _accumulation(job: Job) -> float:
    """A gradient is read, and added to its sum in fp32, unless the product that makes it does that."""
    is_fused = job.program.fused_accumulation and job.config.parallel.gradient_accumulation_fusion
    if is_fused and job.zero_stage != 3:
        return 0.0
    return passes_seconds(job, (job.element_bytes + 8) * layer_parameters_of_rank(job))


def _bytes_moved(job: Job) -> float:
    """Through memory in a layer's forward, beside its products and the attention product."""
    model, tp = job.config.model, job.tp
    share = FUSED_SHARE if job.program.fused_passes else 1.0
    hidden = share * HIDDEN_PASSES * model.hidden_size / job.slices
    widths: float = 2 * (model.num_attention_heads + model.num_kv_heads) * model.head_dim
    widths += (3 if model.activation == "swiglu" else 2) * model.ffn_size / INNER_PASSES
    return job.tokens * job.element_bytes * (hidden + INNER_PASSES * widths / tp)


def _tp_seconds(job: Job) -> float:
    """Two sums over tp, or with sequence parallelism a gather and a scattered sum at each block: the same."""
    group = Group(job.cluster, job.tp, 1)
    num_bytes = job.tokens * job.config.model.hidden_size * job.element_bytes
    if job.config.parallel.sequence_parallel:
        return 4 * group.gather_seconds(num_bytes)
    return 2 * group.reduce_seconds(num_bytes)


def embedding_passes(job: Job) -> Passes:
    """Looking up, the sum over tp, and the table's gradient."""
    num_bytes = job.tokens * job.config.model.hidden_size * job.element_bytes
    talk = Group(job.cluster, job.tp, 1).reduce_seconds(num_bytes)
    table = table_parameters(job.config.model, job.tp) / job.tp
    gradient = passes_seconds(job, 3 * num_bytes + (job.element_bytes * 2 + 8) * table)
    return Passes(Work(passes=passes_seconds(job, 4 * num_bytes), tp=talk), Work(), Work(passes=gradient))


def head_passes(job: Job) -> Passes:
    """The logits, the loss over the cut vocabulary, and their gradients."""
    model, gpu = job.config.model, job.cluster.gpu
    columns, hidden = model.padded_vocab_size(job.tp) // job.tp, model.hidden_size
    product = product_seconds(gpu, job.tokens, columns, hidden, 1, job.element_bytes)
    weight = product_seconds(gpu, columns, hidden, job.tokens, 1, job.element_bytes)
    logits = job.tokens * columns
    talk = Group(job.cluster, job.tp, 1).reduce_seconds(job.tokens * hidden * job.element_bytes)
    table = table_parameters(model, job.tp) / job.tp
    accumulation = passes_seconds(job, (job.element_bytes + 8) * table)
    return Passes(
        Work(product, passes=passes_seconds(job, logits * (2 * job.element_bytes + 5 * 4))),
        Work(product, passes=passes_seconds(job, logits * 3 * 4), tp=talk),
        Work(weight, passes=accumulation),
    )
