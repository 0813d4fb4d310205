"""Memory of a rank, by kind.

Activations in elements a token, after Korthikanti et al. 2022 (table 2), as this engine keeps them: dropout
masks are not stored. tests/ranks/parallel/test_recompute.py holds the engine to the same figures.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from megalite.plan.job import Job
from megalite.plan.parameters import layer_parameters_of_rank, rank_parameters, table_parameters
from megalite.plan.pipeline import peaks_in_flight

FRAGMENTS = 0.06
"""Of what tensors hold: memory that the allocator cannot give out again."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        weights: parameters as the model computes with them.
        gradients: their sums.
        optimizer: main weights and moments.
        activations: kept for backward, at the most.
        logits: on the last stage, with their gradients.
        workspace: what a layer or a collective needs while it runs.
        residual: what no tensor holds.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    workspace: float
    residual: float

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


def rank_memories(job: Job) -> list[Memory]:
    """One for each pipeline rank."""
    return [_rank_memory(job, rank, peak) for rank, peak in enumerate(peaks_in_flight(job))]


def _rank_memory(job: Job, rank: int, peak: int) -> Memory:
    weights, gradients, optimizer = _state(job, rank)
    activations = _activations(job, rank, peak)
    logits = _logits(job) if job.stages.num_stages - 1 in job.stages.stages_of(rank) else 0.0
    workspace = max(0.0, _workspace(job) - logits)  # never both at one time
    workspace += _buffers(job, rank)
    held = weights + gradients + optimizer + activations + logits + workspace
    residual = job.cluster.gpu.residual_gb * 1e9 + FRAGMENTS * held
    return Memory(weights, gradients, optimizer, activations, logits, workspace, residual)


def _buffers(job: Job, rank: int) -> float:
    """Return the bytes that communication has for itself."""
    program, count = job.program, rank_parameters(job, rank)
    buckets = min(program.buffer_bytes, 3 * job.element_bytes * count)
    return buckets + (min(program.sum_buffer_bytes, 4 * count) if job.num_sharing > 1 else 0.0)


def _state(job: Job, rank: int) -> tuple[float, float, float]:
    """Weights, gradients and the optimizer's state, shared out as the ZeRO stage says."""
    count, zero, shares = rank_parameters(job, rank), job.zero_stage, job.num_sharing
    element = job.element_bytes
    main = 12 if element == 2 else 2 * element
    summed = job.program.gradient_bytes if element == 2 else element
    main += job.program.shared_copy_bytes
    return (
        element * count / (shares if zero == 3 else 1),
        summed * count / (shares if zero >= 2 else 1),
        main * count / (shares if zero >= 1 else 1),
    )


def layer_elements(job: Job) -> dict[str, float]:
    """What one layer keeps of a microbatch, in elements, by part."""
    model, tp = job.config.model, job.tp
    hidden, program = model.hidden_size, job.program
    queries, keys = model.num_attention_heads * model.head_dim, model.num_kv_heads * model.head_dim
    norm = hidden / (1 if program.keeps_gathered else job.slices)
    halves = 2 if model.activation == "swiglu" else 1
    parts = {
        "residual": 2 * hidden / job.slices,
        "attention norm": norm,
        "mlp norm": norm,
        "qkv": 2 * (queries + keys) / tp,
        "rotated": 0.0,
        "core": 0.0,
        "hidden": halves * model.ffn_size / tp,
        "activation": (2 if halves == 2 and program.keeps_gate else 1) * model.ffn_size / tp,
    }
    if model.position_embedding_type == "rope" and not program.fused_passes:
        parts["rotated"] = (queries + keys) / tp  # beside the product that values are a view of
    if program.keeps_scores:
        scores = 2 if model.attention_dropout > 0 else 1
        parts["core"] = (scores * model.num_attention_heads * model.seq_length + queries) / tp
    return {name: job.tokens * size for name, size in parts.items()}


_DROPPED = {
    "core_attn": ("core", "rotated"),
    "mlp": ("mlp norm", "hidden", "activation"),
    "mlp_act": ("activation",),
    "layernorm": ("attention norm", "mlp norm"),
}
"""Parts of `layer_elements` that a recomputed module does not keep."""


def kept_elements(job: Job) -> float:
    """What one layer keeps that is not recomputed as a whole."""
    parts = layer_elements(job)
    dropped = {part for module in job.config.recompute.modules for part in _DROPPED[module]}
    return sum(size for name, size in parts.items() if name not in dropped)


def _stage_elements(job: Job, num_layers: int) -> float:
    """What a stage keeps of one microbatch."""
    recompute, hidden = job.config.recompute, job.config.model.hidden_size
    is_cut = recompute.distribute_saved_activations or job.slices > 1
    group_input = job.tokens * hidden / (job.tp if is_cut else 1)
    return sum(
        group_input if is_again else len(group) * kept_elements(job)
        for group, is_again in recompute.groups(num_layers)
    )


def _activations(job: Job, rank: int, peak: int) -> float:
    """Of the microbatches in flight; with several chunks each of them counts by itself, at their average."""
    stages = job.stages.stages_of(rank)
    elements = sum(_stage_elements(job, job.layers[stage]) for stage in stages) / len(stages)
    return peak * elements * job.element_bytes


def _logits(job: Job) -> float:
    """Their columns of this rank, which become their gradient; other programs have a copy in fp32."""
    columns = job.config.model.padded_vocab_size(job.tp) // job.tp
    copy = job.program.logit_copy_bytes
    return job.tokens * columns * (job.element_bytes + copy) / job.config.recompute.cross_entropy_chunks


def _workspace(job: Job) -> float:
    """The largest of what comes and goes: a recomputed group, whole weights of two layers."""
    recompute = job.config.recompute
    work = 0.0
    parts = layer_elements(job)
    if recompute.recompute_granularity == "full":
        longest = max(
            (len(group) for group, is_again in recompute.groups(max(job.layers)) if is_again), default=0
        )
        work = longest * sum(parts.values())
    else:
        work = sum(parts.values()) - kept_elements(job)
    # A layer's gradients of its activations, while it runs.
    work += 2 * job.tokens * (job.config.model.ffn_size / job.tp + job.config.model.hidden_size)
    if job.zero_stage == 3:
        work += 3 * layer_parameters_of_rank(job) + 2 * table_parameters(job.config.model, job.tp) / job.tp
    return work * job.element_bytes
