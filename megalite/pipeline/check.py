"""What a rank's own order of actions must be, and what it keeps in memory."""

from __future__ import annotations

from collections.abc import Sequence

from megalite.pipeline.action import Action, Kind
from megalite.pipeline.timing import ScheduleError

_BEFORE = {
    Kind.FORWARD: None,
    Kind.BACKWARD: Kind.FORWARD,
    Kind.BACKWARD_INPUT: Kind.FORWARD,
    Kind.BACKWARD_WEIGHT: Kind.BACKWARD_INPUT,
}
_HELD = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_INPUT: 0, Kind.BACKWARD_WEIGHT: -1}


def check_order(rank: int, actions: Sequence[Action]) -> None:
    """Sees that each forward comes once and, in a schedule that has backwards, its backward once after it.

    A backward in two parts is the input's part, then the weights'.

    Raises:
        ScheduleError: it is not so.
    """
    seen: set[Action] = set()
    for action in actions:
        if action in seen:
            raise ScheduleError(f"rank {rank} runs {action} twice")
        before = _of_kind(action, _BEFORE[action.kind])
        if before is not None and before not in seen:
            raise ScheduleError(f"rank {rank} runs {action} before {before}")
        seen.add(action)
    kinds = {action.kind for action in seen} - {Kind.FORWARD}
    for action in actions:
        if kinds and not any(_of_kind(action, kind) in seen for kind in kinds):
            raise ScheduleError(f"rank {rank} never runs the backward of {action}")
        if action.kind is Kind.BACKWARD_INPUT and _of_kind(action, Kind.BACKWARD_WEIGHT) not in seen:
            raise ScheduleError(f"rank {rank} never runs {_of_kind(action, Kind.BACKWARD_WEIGHT)}")


def _of_kind(action: Action, kind: Kind | None) -> Action | None:
    """The action of another kind on the same microbatch and chunk."""
    return kind and Action(kind, action.microbatch, action.chunk)


def peak_in_flight(actions: Sequence[Action]) -> int:
    """Most microbatches that had their forward and not yet all of their backward; each chunk's by itself.

    What the weights' gradients are made from is kept until then: of a backward in parts the last one counts.
    Without any backward, as in an evaluation, nothing is kept and the figure means nothing.
    """
    peak = in_flight = 0
    for action in actions:
        in_flight += _HELD[action.kind]
        peak = max(peak, in_flight)
    return peak
