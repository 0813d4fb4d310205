"""Seconds of ring attention's messages that its computation does not hide."""

from __future__ import annotations

from megalite.observe.unit_record import AttentionCall
from megalite.plan.communication import Group


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
