"""Count the activations that layers save for backward, and the offloaded ones.

Counts are elements per token, after Korthikanti et al. 2022 (table 2), but without dropout masks, which
megalite does not save. tests/ranks/tensor_parallel/test_recompute.py compares them with the real model.
"""

from __future__ import annotations

from megalite.plan.planned_run import PlannedRun


def layer_elements(run: PlannedRun) -> dict[str, float]:
    """Return the elements that a layer saves per microbatch without recomputation, by part."""
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
    tokens = run.tokens
    return {name: tokens * size for name, size in parts.items()}


_DROPPED = {
    "core_attn": ("core", "rotated"),
    "mlp": ("mlp norm", "hidden", "activation"),
    "mlp_act": ("activation",),
    "layernorm": ("attention norm", "mlp norm"),
}
"""Parts of `layer_elements` that are not saved if a module is recomputed."""


def kept_elements(run: PlannedRun) -> float:
    """Return the elements that a layer saves per microbatch, unless it is fully recomputed."""
    parts = layer_elements(run)
    dropped = {part for module in run.config.recompute.modules for part in _DROPPED[module]}
    return sum(size for name, size in parts.items() if name not in dropped)


def group_elements(run: PlannedRun, num_layers: int) -> list[float]:
    """Return the elements that each group of a stage's layers saves per microbatch."""
    recompute, hidden = run.config.recompute, run.config.model.hidden_size
    is_sharded = recompute.distribute_saved_activations or run.num_sequence_shards > 1
    group_input, layer = run.tokens * hidden / (run.tp if is_sharded else 1), kept_elements(run)
    return [
        group_input if is_again else len(group) * layer for group, is_again in recompute.groups(num_layers)
    ]


def stage_elements(run: PlannedRun, num_layers: int) -> float:
    """Return the elements that a stage saves per microbatch."""
    return sum(group_elements(run, num_layers))


def offloaded_elements(run: PlannedRun, num_layers: int) -> list[float]:
    """Return the elements that each offloaded group of a stage's layers saves per microbatch."""
    recompute = run.config.recompute
    if recompute.cpu_offload_activations == 0:
        return []
    groups = zip(recompute.groups(num_layers), group_elements(run, num_layers), strict=True)
    return [elements for (group, _), elements in groups if group.start < recompute.cpu_offload_activations]


def linear_input_elements(run: PlannedRun) -> float:
    """Return the elements of the inputs of one layer's linear layers."""
    model = run.config.model
    inputs = 2 * model.hidden_size / run.num_sequence_shards  # for the two column-parallel layers
    inputs += (model.num_attention_heads * model.head_dim + model.ffn_size) / run.tp
    return run.tokens * inputs
