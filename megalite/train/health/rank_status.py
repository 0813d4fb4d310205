"""The status that each rank posts for the others: its progress and its open events."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from megalite.distributed.axis import WORLD
from megalite.distributed.observer import CHECKPOINT, DEVICE, PROFILER, STORE_BARRIER, Wait
from megalite.pipeline.schedules import Action
from megalite.train.telemetry.timers import BATCH_GENERATOR

_IMPLIED = ("forward-backward", "optimizer", BATCH_GENERATOR)
"""Timers that add nothing to the events inside them."""


@dataclass(frozen=True)
class RankStatus:
    """Status of one rank.

    Attributes:
        stamp: increases with each status; a rank is silent if its stamp stays the same.
        num_done: number of finished iterations.
        idle: seconds without progress.
        is_stuck: whether the rank has been idle longer than it may.
        has_left: whether its training is over.
        activity: description of its open events; empty unless it is stuck.
        waits_for: ranks that it waits for; None if it does not wait, empty if it cannot know which.
        collectives: number of collectives that it has started on each axis, keyed by the axis' ranks.
        stack: stack of its main thread, as text.
    """

    rank: int
    host: str
    stamp: int
    num_done: int
    idle: float = 0.0
    is_stuck: bool = False
    has_left: bool = False
    activity: str = ""
    waits_for: tuple[int, ...] | None = None
    collectives: tuple[tuple[tuple[int, ...], int], ...] = ()
    stack: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> RankStatus:
        fields = json.loads(text)
        if fields["waits_for"] is not None:
            fields["waits_for"] = tuple(fields["waits_for"])
        fields["collectives"] = tuple((tuple(ranks), number) for ranks, number in fields["collectives"])
        return RankStatus(**fields)


def describe(events: Sequence[object]) -> str:
    """Describe open events, given outermost first, from the innermost to the outermost."""
    shown = [event for event in events[:-1] if event not in _IMPLIED] + list(events[-1:])
    return ", in ".join(_text(event) for event in reversed(shown)) or "in no event that ranks post"


def awaited_ranks(
    events: Sequence[object], ranks_of: Mapping[str, tuple[int, ...]]
) -> tuple[int, ...] | None:
    """Return the ranks that a rank in these events waits for; see `RankStatus.waits_for`.

    Args:
        ranks_of: global ranks along each axis, by the axis' name.
    """
    innermost = events[-1] if events else None
    if isinstance(innermost, Wait):
        return ranks_of[innermost.axis] if innermost.peer is None else (innermost.peer,)
    return () if innermost == DEVICE else None


def may_take_any_time(events: Sequence[object]) -> bool:
    """Return whether a rank in these events does work of unknown length: a checkpoint or a profile.

    This is False for a rank that only waits for such work of another rank: if the other rank hangs, no rank
    makes progress.
    """
    for event in reversed(events):
        if event in (CHECKPOINT, PROFILER):
            return True
        if isinstance(event, Wait) and event.what != STORE_BARRIER:
            return False
    return False


def _text(event: object) -> str:
    if isinstance(event, Action):
        return f"{event.kind.value} of {_microbatch(event)}"
    if isinstance(event, Wait):
        of = _microbatch(event.of) if isinstance(event.of, Action) else event.of
        peer = f" {'from' if event.what.endswith('-recv') else 'to'} rank {event.peer}"
        ranks = "all ranks" if event.axis == WORLD else event.axis
        return f"{event.what}{f' of {of}' if of else ''}{'' if event.peer is None else peer} over {ranks}"
    return str(event)


def _microbatch(action: Action) -> str:
    return f"microbatch {action.microbatch}{f' of chunk {action.chunk}' if action.chunk else ''}"
