"""What one rank did when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from megalite.observer import Observer, Wait
from megalite.pipeline.action import Action
from megalite.train.telemetry.marks import Marks
from megalite.train.telemetry.timers import BATCH_GENERATOR

ITERATION = "iteration"
DATA = "data"
PART = "part"
_WAITS = {"pp": "pp wait", "tp": "tp wait", "dp": "dp wait"}
OTHER_WAIT = "other wait"

Traced = Action | Wait | str
"""A pipeline's action, a wait for other ranks, or a part of an iteration by its timer's name."""


class Span(NamedTuple):
    """Something that a rank did.

    Attributes:
        category: "iteration"; the kind of an action; "pp wait" and the like; "data"; "part" for all others.
        start: seconds of the host's clock, as `end`.
        microbatch: of an action; None for all else, as `chunk`.
    """

    name: str
    category: str
    start: float
    end: float
    microbatch: int | None = None
    chunk: int | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Recorder(Observer[Traced]):
    """Notes the moments at which things begin and end; what they were in seconds is asked for later.

    Args:
        marks: where the moments come from.
        clock: marks of the host, whose clock all spans are told in.
    """

    def __init__(self, marks: Marks[Any], clock: Marks[float]) -> None:
        self._marks = marks
        # On a GPU the stream is empty here, so that both mean the same moment.
        self._origin, self._origin_seconds = marks.now(), clock.now()
        self._open: list[tuple[Traced, Any]] = []
        self._done: list[tuple[Traced, str | None, Any, Any]] = []

    def begins(self, what: Traced) -> None:
        self._open.append((what, self._marks.now()))

    def ends(self, what: Traced) -> None:
        while self._open:  # what an exception has broken off never ends
            begun, start = self._open.pop()
            if begun == what:
                self._done.append((what, None, start, self._marks.now()))
                return

    @contextmanager
    def iteration(self, number: int) -> Iterator[None]:
        """The block is this iteration; it is noted once it is over."""
        start = self._marks.now()
        yield
        self._done.append((f"{ITERATION} {number}", ITERATION, start, self._marks.now()))

    def spans(self) -> list[Span]:
        """All that is over, in the order in which it began, what holds others before them."""
        found = []
        for what, category, start, end in self._done:
            first = self._origin_seconds + self._marks.seconds(self._origin, start)
            last = first + self._marks.seconds(start, end)
            found.append(_span(what, category, first, last))
        return sorted(found, key=lambda span: (span.start, -span.end))


def _span(what: Traced, category: str | None, start: float, end: float) -> Span:
    if isinstance(what, Action):
        return Span(str(what), what.kind.value, start, end, what.microbatch, what.chunk)
    if isinstance(what, Wait):
        return Span(what.what, _WAITS.get(what.axis, OTHER_WAIT), start, end)
    return Span(what, category or (DATA if what == BATCH_GENERATOR else PART), start, end)
