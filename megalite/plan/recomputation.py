"""What recomputation adds to a layer's backward."""

from __future__ import annotations

from megalite.plan.attention import attention_seconds
from megalite.plan.job import Job
from megalite.plan.layer import INNER_PASSES, passes_seconds, weight_shapes
from megalite.plan.products import product_seconds
from megalite.plan.work import Passes, Work


def stage_recomputation(job: Job, layer: Passes, num_layers: int) -> Work:
    """Of a stage with that many layers, each of which takes as long as `layer`, for one microbatch."""
    recompute = job.config.recompute
    if recompute.recompute_granularity == "full":
        again = sum(len(group) for group, is_again in recompute.groups(num_layers) if is_again)
        return layer.forward * again
    return _of_modules(job, layer) * num_layers


def _of_modules(job: Job, layer: Passes) -> Work:
    """The parts of one layer that are recomputed."""
    model, modules = job.config.model, job.config.recompute.modules
    element = job.tokens * job.element_bytes
    norm = passes_seconds(job, 2 * INNER_PASSES * element * model.hidden_size / job.slices)
    activation = passes_seconds(job, 2 * INNER_PASSES * element * model.ffn_size / job.tp)
    work = Work()
    if "core_attn" in modules:
        work += Work(attention=attention_seconds(job)[0])
    if "layernorm" in modules:
        work += Work(passes=norm)
    if "mlp_act" in modules:
        work += Work(passes=activation)
    if "mlp" in modules:
        _, _, (out, hidden), _ = weight_shapes(job)
        product = product_seconds(job.cluster.gpu, job.tokens, out, hidden, 1, job.element_bytes)
        work += Work(product, passes=norm + activation, tp=layer.forward.tp / 4)
    return work
