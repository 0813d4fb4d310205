"""Bytes of activations that a stage saves for backward, and offloaded ones, by its layers' records."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from megalite.observe.unit_record import INPUT
from megalite.plan.planned_run import PlannedRun

Kinds = Sequence[int]
"""The kinds of a stage's layers, in order."""
OF_LOGITS = ("head", "loss")
"""Parts of the head that are not modules of multi-token prediction."""


def group_bytes(run: PlannedRun, kinds: Kinds) -> list[float]:
    """Return the bytes that each group of a stage's layers saves per microbatch."""
    recompute, layers = run.config.recompute, run.units.layers
    is_sliced = recompute.distribute_saved_activations and run.num_sequence_shards == 1
    return [
        layers[kinds[group.start]].input_bytes / (run.tp if is_sliced else 1)
        + sum(shared_key_bytes(run, kinds[i]) for i in group)
        if is_again
        else sum(layers[kinds[i]].saved_bytes for i in group)
        for group, is_again in recompute.groups(len(kinds))
    ]


def shared_key_bytes(run: PlannedRun, kind: int) -> float:
    """Return the bytes of the keys and values that a layer gives to later ones, which keep them as inputs."""
    model = run.config.model
    spec = model.layer_spec(kind).attention
    if spec is None or not spec.gives_keys:
        return 0.0
    num_tokens = model.seq_length // run.cp * run.config.training.micro_batch_size
    return 2 * num_tokens * max(1, spec.num_kv_heads // run.tp) * spec.head_dim * run.element_bytes


def part_bytes(run: PlannedRun, kinds: Kinds) -> dict[str, float]:
    """Return the bytes that a stage's layers save per microbatch, by the part of a layer that makes them.

    Of a group that is recomputed in full, this is its input, and the keys that it gives to later layers.
    """
    found = dict[str, float]()
    groups = zip(run.config.recompute.groups(len(kinds)), group_bytes(run, kinds), strict=True)
    for (group, is_again), size in groups:
        saved = [run.units.layers[kinds[i]].saved for i in group]
        for part, num_bytes in [(INPUT, size)] if is_again else chain(*saved):
            found[part] = found.get(part, 0.0) + num_bytes
    return found


def stage_bytes(run: PlannedRun, kinds: Kinds) -> float:
    """Return the bytes that a stage's layers save per microbatch."""
    return sum(group_bytes(run, kinds))


def offloaded_bytes(run: PlannedRun, kinds: Kinds) -> list[float]:
    """Return the bytes that each offloaded group of a stage's layers saves per microbatch."""
    recompute = run.config.recompute
    if recompute.cpu_offload_activations == 0:
        return []
    groups = zip(recompute.groups(len(kinds)), group_bytes(run, kinds), strict=True)
    return [size for (group, _), size in groups if group.start < recompute.cpu_offload_activations]


def later_token_bytes(run: PlannedRun) -> float:
    """Return the bytes that the modules of multi-token prediction save per microbatch."""
    if run.config.model.mtp_num_layers == 0:
        return 0.0
    return sum(each.num_bytes for each in run.units.head.saved if each.part not in (INPUT, *OF_LOGITS))


def embedding_bytes(run: PlannedRun, stage: int) -> float:
    """Return the bytes of embeddings for each layer that a stage keeps per microbatch.

    The first stage keeps what their backward reads, and each other one what it has received.
    """
    model = run.config.model
    if model.hidden_size_per_layer_input is None:
        return 0.0
    if stage > 0:
        of_token = model.num_layers * model.hidden_size_per_layer_input * run.element_bytes
        return run.tokens * of_token / run.num_sequence_shards
    return sum(each.num_bytes for each in run.units.embedding.saved if each.part != INPUT)


def deferred_input_bytes(run: PlannedRun, kind: int) -> float:
    """Return the bytes of a layer's activations that its deferred weight gradients read."""
    phase = run.units.layers[kind].weight
    gathered = {each.gemm for each in phase.collectives if each.call.kind == "all-gather"}
    return sum(
        gemm.k * gemm.n * gemm.element_bytes / (run.tp if number in gathered else 1)
        for number, gemm in enumerate(phase.gemms)
    )
