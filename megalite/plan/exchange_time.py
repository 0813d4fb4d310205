"""Estimate the time of context- and expert-parallel communication. Only that of a ring is hidden."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import comb

from megalite.config.cp_comm_type import CpCommType
from megalite.distributed.axes import EXPERTS
from megalite.observe.unit_record import AttentionCall, PhaseRecord
from megalite.plan.communication import Group
from megalite.plan.planned_run import PlannedRun


def ep_seconds(run: PlannedRun, phase: PhaseRecord) -> float:
    """Return the seconds of the messages between the ranks that hold the experts of a group of tokens.

    The busiest rank's messages count, for which the others wait.
    """
    if not run.config.parallel.has_expert_axes:
        return 0.0
    sizes = run.sizes_in(EXPERTS)
    group = Group(run.cluster, sizes["ep"] * sizes["etp"], 1)
    exchange = group.all_to_all_seconds
    if run.program.sends_tokens_once and sizes["etp"] == 1:
        exchange = partial(dispatch_seconds, run, group)
    calls = (each.call for each in phase.collectives if each.call.is_over_experts)
    return sum(
        (exchange if call.kind == "all-to-all" else group.gather_seconds)(call.num_bytes) for call in calls
    )


def dispatch_seconds(run: PlannedRun, group: Group, num_bytes: float) -> float:
    """Return the seconds in which tokens reach their experts' ranks, or outputs come back, as with DeepEP.

    An all-to-all sends a token once for each of its experts. DeepEP sends it once to each node that has some
    of them, to the GPU with the sender's number, which passes it on once to each rank of the node that has
    some (DeepSeek-AI 2024, DeepSeek-V3, section 3.2.2). The outputs are added up on the same way back.

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


def recurrent_cp_seconds(run: PlannedRun, phase: PhaseRecord) -> float:
    """Return the seconds in which recurrent layers exchange tokens for heads, and heads for tokens.

    Other programs than megalite are assumed to hide it.
    """
    if not run.program.is_own:
        return 0.0
    group = Group(run.cluster, run.cp, run.tp)
    calls = (each.call for each in phase.collectives)
    return sum(
        group.all_to_all_seconds(call.num_bytes)
        for call in calls
        if call.kind == "all-to-all" and call.axis == "cp"
    )


def cp_seconds(run: PlannedRun, call: AttentionCall, attention_seconds: float) -> float:
    """Return the seconds that a call of attention waits for context-parallel communication.

    Other programs than megalite are assumed to hide it, as ring attention does.

    Args:
        attention_seconds: seconds of the computation.
    """
    if call.cp_comm_type is None or not run.program.is_own:
        return 0.0
    return CP_SECONDS[call.cp_comm_type](run, call, attention_seconds)


def _gather_seconds(run: PlannedRun, call: AttentionCall, _: float) -> float:
    """Gather keys and values before a forward, and reduce-scatter their gradients after a backward."""
    group = Group(run.cluster, run.cp, run.tp)
    return group.gather_seconds(_key_elements(call) * call.keys * run.element_bytes)


def _exchange_seconds(run: PlannedRun, call: AttentionCall, _: float) -> float:
    """Exchange queries, keys and values for the part of the heads that the call has, and the output back."""
    heads, _ring = _levels(run, call)
    group = Group(run.cluster, heads, run.tp)
    element = run.element_bytes
    entering = (call.heads * call.size + _key_elements(call)) * call.queries * element
    leaving = call.heads * call.value_size * call.queries * element
    return group.all_to_all_seconds(entering) + group.all_to_all_seconds(leaving)


def _ring_seconds(run: PlannedRun, call: AttentionCall, attention_seconds: float) -> float:
    """Pass keys and values around the ring under the computation."""
    heads, ring = _levels(run, call)
    group = Group(run.cluster, ring, heads * run.tp)
    return exposed_ring_seconds(group, call, _key_elements(call) * run.element_bytes, attention_seconds)


def ring_slices(call: AttentionCall, num_ranks: int) -> float:
    """Return how many slices of keys and values a rank sends, in the mean over the ranks.

    There are two slices for each rank. In causal attention, all ranks need the first slice of a rank, and
    half of them the last one. A window reaches into few slices before a query's own.
    """
    if not call.is_causal:
        return 2.0 * (num_ranks - 1)
    slices = 1.5 * (num_ranks - 1)
    if call.window is None:
        return slices
    length = call.keys / (2 * num_ranks)
    return min(slices, 2.0 * -(-call.window // length) * (num_ranks - 1) / num_ranks)


def exposed_ring_seconds(
    group: Group, call: AttentionCall, bytes_per_token: float, attention_seconds: float
) -> float:
    """Return the seconds that a call of attention waits for messages.

    Backward sends keys and values again, and as many gradients back. Messages run under the computation with
    keys that have arrived; the first computation is with a rank's own keys.

    Args:
        bytes_per_token: bytes of a token's keys and values.
        attention_seconds: seconds of the computation.
    """
    of_slice = bytes_per_token * call.keys / (2 * group.size)
    num_bytes = ring_slices(call, group.size) * of_slice * (2 if call.is_backward else 1)
    # An all-gather of n bytes sends n (size - 1) / size.
    seconds = group.gather_seconds(num_bytes * group.size / (group.size - 1))
    return max(0.0, seconds - attention_seconds)


def _levels_seconds(run: PlannedRun, call: AttentionCall, attention_seconds: float) -> float:
    """Exchange heads between neighbours, and pass keys and values around the ring of their groups."""
    return _exchange_seconds(run, call, 0.0) + _ring_seconds(run, call, attention_seconds)


def _levels(run: PlannedRun, call: AttentionCall) -> tuple[int, int]:
    """Return how many ranks exchange heads for the call, and how many form a ring."""
    assert call.cp_comm_type is not None
    return run.config.parallel.cp_levels(call.cp_comm_type)


def _key_elements(call: AttentionCall) -> int:
    """Return the elements of a token's keys and values."""
    return call.kv_heads * (call.size + call.value_size)


CP_SECONDS: Mapping[CpCommType, Callable[[PlannedRun, AttentionCall, float], float]] = {
    "all_gather": _gather_seconds,
    "a2a": _exchange_seconds,
    "p2p": _ring_seconds,
    "a2a+p2p": _levels_seconds,
}
"""Seconds of the communication of a call of attention, by --cp-comm-type. A search tries these."""
