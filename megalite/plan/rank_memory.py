"""Memory of a rank, by kind.

Activations are counted in elements per token, after Korthikanti et al. 2022 (table 2), but without dropout
masks, which megalite does not save. tests/ranks/tensor_parallel/test_recompute.py compares the model with
these numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from megalite.plan.iteration_time import peaks_in_flight
from megalite.plan.model_parameters import layer_parameters_of_rank, rank_parameters, table_parameters
from megalite.plan.offloaded_state import offloaded_state
from megalite.plan.planned_run import PlannedRun

FRAGMENTS = 0.06
"""Memory lost to fragmentation, as a share of what tensors hold."""


@dataclass(frozen=True)
class RankMemory:
    """Hold the bytes of one rank.

    Attributes:
        weights: parameters in the precision of the model.
        gradients: gradient sums.
        optimizer: main weights and moments that are not offloaded.
        activations: activations saved for backward, at the peak.
        logits: logits and their gradients, on the last stage.
        workspace: temporary memory of a layer or a collective.
        residual: memory that no tensor holds: the process, and fragmentation.
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


def rank_memories(run: PlannedRun) -> list[RankMemory]:
    """Return the memory of each pipeline rank."""
    return [_rank_memory(run, rank, peak) for rank, peak in enumerate(peaks_in_flight(run))]


def _rank_memory(run: PlannedRun, rank: int, peak: int) -> RankMemory:
    weights, gradients, optimizer = _state(run, rank)
    if (offloaded := offloaded_state(run, rank)) is not None:
        optimizer -= offloaded.state
    activations = _activations(run, rank, peak)
    logits = _logits(run) if run.stages.num_stages - 1 in run.stages.stages_of(rank) else 0.0
    workspace = max(0.0, _workspace(run) - logits)  # never at the same time
    workspace += _buffers(run, rank)
    held = weights + gradients + optimizer + activations + logits + workspace
    residual = run.cluster.gpu.residual_gb * 1e9 + FRAGMENTS * held
    return RankMemory(weights, gradients, optimizer, activations, logits, workspace, residual)


def _buffers(run: PlannedRun, rank: int) -> float:
    """Return the bytes of communication buffers."""
    program, count = run.program, rank_parameters(run, rank)
    buckets = min(program.buffer_bytes, 3 * run.element_bytes * count)
    return buckets + (min(program.sum_buffer_bytes, 4 * count) if run.num_sharing > 1 else 0.0)


def _state(run: PlannedRun, rank: int) -> tuple[float, float, float]:
    """Return weights, gradients and optimizer state, sharded by the ZeRO stage."""
    count, zero, shares = rank_parameters(run, rank), run.zero_stage, run.num_sharing
    element = run.element_bytes
    main = 12 if element == 2 else 2 * element
    summed = run.program.gradient_bytes if element == 2 else element
    main += run.program.shared_copy_bytes
    full = _tied_parameters(run, rank) if zero == 2 else 0.0
    return (
        element * count / (shares if zero == 3 else 1),
        summed * (full + (count - full) / (shares if zero >= 2 else 1)),
        main * count / (shares if zero >= 1 else 1),
    )


def _tied_parameters(run: PlannedRun, rank: int) -> float:
    """Return the parameters of a tied embedding that a rank's stage shares with another stage.

    ZeRO stage 2 keeps their gradient full until the parts of both stages are added.
    """
    model, stages = run.config.model, run.stages.stages_of(rank)
    is_first_or_last = 0 in stages or run.stages.num_stages - 1 in stages
    if model.untie_embeddings_and_output_weights or run.pp == 1 or not is_first_or_last:
        return 0.0
    return table_parameters(model, run.tp) / run.tp


def layer_elements(run: PlannedRun) -> dict[str, float]:
    """Return the elements that one layer saves of a microbatch without recomputation, by part."""
    model, tp = run.config.model, run.tp
    hidden, program = model.hidden_size, run.program
    queries, keys = model.num_attention_heads * model.head_dim, model.num_kv_heads * model.head_dim
    norm = hidden / (1 if program.keeps_gathered else run.num_sequence_shards)
    halves = 2 if model.is_gated else 1
    parts = {
        "residual": 2 * hidden / run.num_sequence_shards,
        "attention norm": norm,
        "mlp norm": norm,
        "qkv": 2 * (queries + keys) / tp,
        "rotated": 0.0,
        "core": 0.0,
        "hidden": halves * model.ffn_size / tp,
        "activation": (2 if halves == 2 and program.keeps_gate else 1) * model.ffn_size / tp,
    }
    if model.position_embedding_type == "rope" and not program.fused_elementwise:
        parts["rotated"] = (queries + keys) / tp  # besides the QKV output, which the values are a view of
    if program.keeps_scores:
        scores = 2 if model.attention_dropout > 0 else 1
        parts["core"] = (scores * model.num_attention_heads * model.seq_length + queries) / tp
    return {name: run.tokens * size for name, size in parts.items()}


_DROPPED = {
    "core_attn": ("core", "rotated"),
    "mlp": ("mlp norm", "hidden", "activation"),
    "mlp_act": ("activation",),
    "layernorm": ("attention norm", "mlp norm"),
}
"""Parts of `layer_elements` that a recomputed module does not save."""


def kept_elements(run: PlannedRun) -> float:
    """Return the elements that one layer saves of a microbatch, unless it is fully recomputed."""
    parts = layer_elements(run)
    dropped = {part for module in run.config.recompute.modules for part in _DROPPED[module]}
    return sum(size for name, size in parts.items() if name not in dropped)


def _stage_elements(run: PlannedRun, num_layers: int) -> float:
    """Return the elements that a stage saves of one microbatch."""
    recompute, hidden = run.config.recompute, run.config.model.hidden_size
    is_sharded = recompute.distribute_saved_activations or run.num_sequence_shards > 1
    group_input = run.tokens * hidden / (run.tp if is_sharded else 1)
    return sum(
        group_input if is_again else len(group) * kept_elements(run)
        for group, is_again in recompute.groups(num_layers)
    )


def _activations(run: PlannedRun, rank: int, peak: int) -> float:
    """Return the activations of the microbatches in flight; each chunk counts at the average size."""
    stages = run.stages.stages_of(rank)
    elements = sum(_stage_elements(run, run.layers[stage]) for stage in stages) / len(stages)
    return peak * elements * run.element_bytes


def _logits(run: PlannedRun) -> float:
    """Return this rank's columns, whose gradient replaces them; other programs have a copy in fp32."""
    model, copy = run.config.model, run.program.logit_copy_bytes
    elements = run.tokens * model.predicted_share * (model.padded_vocab_size(run.tp) // run.tp)
    return elements * (run.element_bytes + copy) / run.config.recompute.cross_entropy_chunks


def _workspace(run: PlannedRun) -> float:
    """Return the largest temporary memory: a recomputed group, or with ZeRO 3 the weights of two layers."""
    recompute = run.config.recompute
    work = 0.0
    parts = layer_elements(run)
    if recompute.recompute_granularity == "full":
        longest = max(
            (len(group) for group, is_again in recompute.groups(max(run.layers)) if is_again), default=0
        )
        work = longest * sum(parts.values())
    else:
        work = sum(parts.values()) - kept_elements(run)
    # Gradients of the activations of the layer that runs.
    work += 2 * run.tokens * (run.config.model.ffn_size / run.tp + run.config.model.hidden_size)
    if run.zero_stage == 3:
        work += 3 * layer_parameters_of_rank(run) + 2 * table_parameters(run.config.model, run.tp) / run.tp
    return work * run.element_bytes
