"""Rules for documents that are assigned to context-parallel ranks (--dynamic-context-parallel)."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.config import Config
from megalite.config.flags import flag_of, flag_with_value
from megalite.errors import Problem

_FLAG = "dynamic_context_parallel"


def assigned_documents(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that samples have documents to assign, and that attention and random numbers can follow them."""
    parallel, model, data = config.parallel, config.model, config.data
    if not parallel.dynamic_context_parallel or parallel.cp == 1:
        return
    if not parallel.has_ring:
        yield Problem(
            (_FLAG, "cp_comm_type"),
            f"{flag_of(_FLAG)} with --cp-comm-type {parallel.cp_comm_type}, whose messages do not depend on "
            "documents: pass --cp-comm-type p2p",
        )
    if not (model.is_causal and data.masks_attention):
        yield Problem(
            (_FLAG, "reset_attention_mask", "document_packing", "sft_packing", "architecture"),
            f"{flag_of(_FLAG)} without documents that a causal model attends within: pass "
            f"--reset-attention-mask or --document-packing best_fit, or remove {flag_of(_FLAG)}",
        )
    if config.training.seq_length_schedule is not None:
        yield Problem(
            (_FLAG, "seq_length_schedule"),
            f"--seq-length-schedule with {flag_of(_FLAG)}, which assigns samples before they are cut into "
            "shorter sequences: remove one",
        )
    if model.has_recurrent_layers:
        yield Problem(
            (_FLAG, "recurrent_mixer", "hybrid_override_pattern"),
            f"{flag_of(_FLAG)} with recurrent layers, which compute the tokens of all samples in one order: "
            f"remove {flag_of(_FLAG)}",
        )
    for name, value in (
        ("record_routing", config.logging.record_routing),
        ("replay_routing_from", config.training.replay_routing_from),
        ("eval_tasks", config.training.eval_tasks),
    ):
        if value is not None:
            yield Problem(
                (_FLAG, name),
                f"{flag_with_value(name, value)} with {flag_of(_FLAG)}, whose ranks hold other positions of "
                "each sample: remove one",
            )
    for name, is_on in (
        ("hidden_dropout", model.hidden_dropout > 0.0),
        ("moe_input_jitter_eps", model.moe_input_jitter_eps is not None),
        ("moe_expert_capacity_factor", model.moe_expert_capacity_factor is not None),
        ("moe_router_force_load_balancing", model.moe_router_force_load_balancing),
    ):
        if is_on:
            yield Problem(
                (_FLAG, name),
                f"{flag_with_value(name, getattr(model, name))} with {flag_of(_FLAG)}: it needs positions "
                f"that are the same in all samples; remove {flag_of(_FLAG)} to keep it",
            )
