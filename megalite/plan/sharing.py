"""What replicas send each other, and how much of it hides under computing."""

from __future__ import annotations

from megalite.plan.communication import Group
from megalite.plan.job import Job
from megalite.plan.layer import LAUNCH_SECONDS
from megalite.plan.parameters import layer_parameters_of_rank, rank_parameters, table_parameters
from megalite.plan.work import Work

USUAL_BUCKET = 40_000_000
"""Elements of a gradient bucket of a large model."""
CONTENTION = 0.25
"""Seconds of computing that a second of communication under it costs: they share the GPU."""
TENSORS = 6
"""Parameters of a layer of a Llama: four matrices and two norms."""
MOMENT_BYTES = 36
"""Of a parameter, that an update takes to or from memory: gradient, main weight, moments, weight, norm."""


def replicas_of(job: Job) -> Group:
    """A rank and those that hold the same weights."""
    return Group(job.cluster, job.num_sharing, job.tp, job.program.one_adapter)


def gradient_bytes(job: Job) -> int:
    """Of an element on its way."""
    config = job.config
    given = config.parallel.grad_communication_dtype
    if job.program.gradient_bytes == 2:
        return 2
    return 2 if given in ("bf16", "fp16") else 8 if config.model.params_dtype == "fp64" else 4


def gathering(job: Job, num_layers: int, forward: Work, backward: Work) -> tuple[Work, Work]:
    """Return what a forward and a backward wait for weights and gradients with ZeRO stage 3.

    Args:
        num_layers: of the stage.
        forward: what runs meanwhile.
        backward: the same, with the forward that recomputation repeats.
    """
    if job.zero_stage != 3:
        return Work(), Work()
    group, layer = replicas_of(job), layer_parameters_of_rank(job)
    rest = rank_parameters(job, 0) - num_layers * layer  # there is one stage

    def seconds(element: int) -> float:
        return num_layers * group.gather_seconds(layer * element)

    # Nothing runs yet under the first gathering of a forward, and nothing any more under the last sum.
    first = group.gather_seconds(rest * job.element_bytes)
    last = group.gather_seconds(rest * gradient_bytes(job))
    weights, gradients = seconds(job.element_bytes), seconds(gradient_bytes(job))
    return (
        Work(dp=first + hidden_under(forward.seconds, weights)),
        Work(dp=last + hidden_under(backward.seconds, first + weights + gradients)),
    )


def hidden_under(computing: float, talking: float) -> float:
    """What communication costs that runs while something is computed."""
    return CONTENTION * min(computing, talking) + max(0.0, talking - computing)


def exchange_seconds(job: Job, backward_seconds: float) -> Work:
    """Gradients' sums and updated weights, as far as backward passes do not hide them."""
    count = max(rank_parameters(job, rank) for rank in {0, job.pp - 1})
    group, zero = replicas_of(job), job.zero_stage
    buckets = count / (job.config.parallel.ddp_bucket_size or USUAL_BUCKET) + 1
    gradients, weights = count * gradient_bytes(job), count * job.element_bytes
    tied, rounds = _tied_seconds(job), job.num_microbatches if zero == 2 else 1
    if zero == 3 or job.num_sharing == 1:
        return Work(dp=tied)
    if zero == 0:
        reduced, gathered = group.reduce_seconds(gradients, buckets), 0.0
    else:
        reduced = rounds * group.gather_seconds(gradients, buckets)
        gathered = group.gather_seconds(weights, buckets)
        backward_seconds *= rounds
    if job.config.parallel.overlap_grad_reduce:
        last = reduced / rounds / buckets  # nothing runs any more under the last bucket
        reduced = last + hidden_under(backward_seconds, reduced - last)
    if job.config.parallel.overlap_param_gather:
        gathered = hidden_under(backward_seconds / 2, gathered)
    return Work(dp=reduced + gathered + tied, launch=_slicing_seconds(job))


def _slicing_seconds(job: Job) -> float:
    """Return the host's seconds to copy gathered weights into parameters, a slice for each replica.

    A slice takes a view and a copy of the host's time. The GPU has nothing to do meanwhile.
    """
    if not job.program.copies_slices or job.zero_stage != 1 or job.num_sharing == 1:
        return 0.0
    layers = sum(job.layers[stage] for stage in job.stages.stages_of(0))
    return TENSORS * layers * job.num_sharing * 2 * LAUNCH_SECONDS


def _tied_seconds(job: Job) -> float:
    """The gradient of a word table that the first and the last stage share."""
    model = job.config.model
    if model.untie_embeddings_and_output_weights or job.pp == 1 or job.stages.turns:
        return 0.0
    ends = Group(job.cluster, 2, job.cluster.world_size // job.pp * (job.pp - 1))
    return ends.reduce_seconds(table_parameters(model, job.tp) / job.tp * gradient_bytes(job))


def update_seconds(job: Job) -> Work:
    """The optimizer's step."""
    gpu = job.cluster.gpu
    count = max(rank_parameters(job, rank) for rank in {0, job.pp - 1})
    shares = job.num_sharing if job.zero_stage else 1
    return Work(passes=count * MOMENT_BYTES / shares / (gpu.memory_gbps * 1e9 * gpu.memory_share))
