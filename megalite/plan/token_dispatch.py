"""Estimate the messages of a program that sends a token once to each node, as DeepEP does.

An all-to-all sends a token once for each of its experts. DeepEP sends it once to each node that has some of
them, to the GPU with the sender's number, which passes it on once to each rank of the node that has some
(DeepSeek-AI 2024, DeepSeek-V3, section 3.2.2). The outputs are added up on the same way back.
"""

from __future__ import annotations

from math import comb

from megalite.plan.communication import Group
from megalite.plan.planned_run import PlannedRun


def dispatch_seconds(run: PlannedRun, group: Group, num_bytes: float) -> float:
    """Return the seconds in which the tokens reach their experts' ranks, or the outputs come back.

    Args:
        group: the ranks that hold the experts.
        num_bytes: size of the rows, one for each expert of a token.
    """
    if group.size == 1 or num_bytes == 0:
        return 0.0
    token_bytes = num_bytes / run.config.model.moe_router_topk
    nodes, near = group.num_nodes, group.ranks_per_node
    outside = token_bytes * num_holders(run, nodes) * (nodes - 1) / nodes
    inside = token_bytes * num_holders(run, group.size) * (near - 1) / near
    return group.exchange_seconds(inside, outside)


def num_holders(run: PlannedRun, num_parts: int) -> float:
    """Return how many of equal parts of the experts have some of a token's, in the mean."""
    model = run.config.model
    assert model.num_experts is not None
    topk, num_experts = model.moe_router_topk, model.num_experts
    if run.program.consecutive_experts:
        return max(1.0, topk * num_parts / num_experts)
    others = num_experts - num_experts // num_parts
    return num_parts * (1 - comb(others, topk) / comb(num_experts, topk))
