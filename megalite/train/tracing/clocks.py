"""How far the ranks' clocks are apart, and how well that is known."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

_NUM_MEETINGS = 20
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Meetings:
    """When a rank came to each of some meetings of all ranks, and when it left, by its own clock.

    Attributes:
        machine: ranks with the same one read one clock.
    """

    machine: str
    came: tuple[float, ...]
    left: tuple[float, ...]


@dataclass(frozen=True)
class Offset:
    """What is to be added to a rank's clock to have rank 0's.

    Attributes:
        error: the truth is at most so many seconds away.
    """

    seconds: float
    error: float


def meet(rank: int) -> Meetings:
    """Meets all ranks, which call it at the same point; a collective in host memory, on a GPU machine too."""
    came, left, token = [], [], torch.zeros(1)
    for _ in range(_NUM_MEETINGS):
        came.append(time.perf_counter())
        dist.all_reduce(token)
        left.append(time.perf_counter())
    machine = _BOOT.read_text().strip() if _BOOT.exists() else f"rank {rank}"
    return Meetings(machine, tuple(came), tuple(left))


def clock_offsets(meetings: Sequence[Meetings]) -> list[Offset]:
    """The clocks of all ranks against rank 0's.

    Nobody leaves a meeting before all have come. So what is added to rank r's clock is at least rank 0's
    coming less r's leaving, and at most rank 0's leaving less r's coming, of every meeting: the best of them
    give the bounds, and their middle is half of their distance from the truth at most. Ranks of one machine
    have one clock: their bounds are bounds of each other, and on rank 0's machine there is nothing to add.
    """
    first = meetings[0]
    bounds: dict[str, tuple[float, float]] = {first.machine: (0.0, 0.0)}
    for each in meetings:
        low = max(a - b for a, b in zip(first.came, each.left, strict=True))
        high = min(a - b for a, b in zip(first.left, each.came, strict=True))
        known_low, known_high = bounds.get(each.machine, (low, high))
        bounds[each.machine] = max(low, known_low), min(high, known_high)
    offsets = {name: Offset((low + high) / 2, (high - low) / 2) for name, (low, high) in bounds.items()}
    return [offsets[each.machine] for each in meetings]
