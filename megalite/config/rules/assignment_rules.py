"""Rules for documents that are assigned to context-parallel ranks (--dynamic-context-parallel)."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.config import Config
from megalite.config.flags import flag_of
from megalite.errors import Problem

_FLAG = "dynamic_context_parallel"


def assigned_documents(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that samples have documents to assign, and that all layers can follow them."""
    parallel, model, data = config.parallel, config.model, config.data
    if not parallel.dynamic_context_parallel or parallel.cp == 1:
        return
    if parallel.cp_comm_type != "p2p":
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
