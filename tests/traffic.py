"""The traffic of a piece of work by axis, kind and bytes, whatever the dtypes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from megalite.observe import operator_log
from megalite.observe.operator_log import Traffic
from megalite.observe.unit_record import CollectiveCall

__all__ = ["Traffic", "by_bytes", "ring_bytes"]


def by_bytes(calls: Mapping[CollectiveCall, int]) -> Counter[tuple[str, str, int]]:
    """Number of calls by axis, kind and bytes of the whole tensor."""
    counted: Counter[tuple[str, str, int]] = Counter()
    for call, count in calls.items():
        counted[call.axis, call.kind, call.num_bytes] += count
    return counted


def ring_bytes(calls: Mapping[tuple[str, str, int], int], axis: str, size: int) -> float:
    """Bytes that a rank sends on an axis, where collectives run in rings."""
    typed = {
        CollectiveCall(name, kind, "", num_bytes): count for (name, kind, num_bytes), count in calls.items()
    }
    return operator_log.ring_bytes(typed, axis, size)
