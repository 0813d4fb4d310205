"""Pipeline schedules: pure functions from a rank to the forwards and backwards that it runs, in order.

A schedule says nothing of messages: they follow from it (`messages`). The simulator proves it, the executor
runs it, and both read the same list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What a rank computes for a microbatch."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class Action:
    """One piece of a rank's work.

    Attributes:
        microbatch: its number within the step, in [0, num_microbatches).
        chunk: which of the rank's parts of the model computes; the global stage is
            ``chunk * num_ranks + rank``.
    """

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        chunk = f" of chunk {self.chunk}" if self.chunk else ""
        return f"{self.kind.value} {self.microbatch}{chunk}"


Schedule = Callable[[int, int, int], list[Action]]
"""From (rank along the axis, number of ranks, number of microbatches) to that rank's actions in order."""


def gpipe(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """All forwards, then all backwards (Huang et al. 2019): every microbatch is in flight at the turn.

    Backwards run in the order of the forwards, so that gradients are summed in the order of microbatches.
    """
    return forward_only(rank, num_ranks, num_microbatches) + _actions(Kind.BACKWARD, num_microbatches)


def one_f_one_b(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """A backward as soon as there is one, then one forward, in turn (PipeDream-Flush, Narayanan et al. 2021).

    The bubble is GPipe's; at most ``num_ranks - rank`` microbatches are in flight, however many there are.
    """
    forwards = _actions(Kind.FORWARD, num_microbatches)
    backwards = _actions(Kind.BACKWARD, num_microbatches)
    num_warmup = min(num_ranks - rank - 1, num_microbatches)
    actions = forwards[:num_warmup]
    for forward, backward in zip(forwards[num_warmup:], backwards, strict=False):
        actions += [forward, backward]
    return actions + backwards[num_microbatches - num_warmup :]


def forward_only(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """What an evaluation runs, on every rank alike."""
    return _actions(Kind.FORWARD, num_microbatches)


def _actions(kind: Kind, num_microbatches: int) -> list[Action]:
    return [Action(kind, microbatch) for microbatch in range(num_microbatches)]


SCHEDULES: dict[str, Schedule] = {"1f1b": one_f_one_b, "gpipe": gpipe}
"""Schedules of a training step, by the name that ``--pipeline-schedule`` gives them."""
