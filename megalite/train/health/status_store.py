"""Exchange the ranks' statuses through the process group's store, with a time-out on every call."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TypeVar

from megalite.distributed.axis import CHECKPOINT, DEVICE, PROFILER, STORE_BARRIER, WORLD, Wait
from megalite.pipeline.schedules import Action
from megalite.train.telemetry.timers import BATCH_GENERATOR

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")

_PREFIX = "megalite/watchdog"
_END = f"{_PREFIX}/end"
_NUM_REPORTS = f"{_PREFIX}/reports"
_NUM_READY = f"{_PREFIX}/ready"


class NoAnswer(RuntimeError):
    """Raised if a call did not return in time, or failed."""


def call_within(seconds: float, function: Callable[[], T]) -> T:
    """Call a function that may never return in its own thread, and return its result.

    Raises:
        NoAnswer: it did not return in time, or raised an error.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, name="watchdog-call", daemon=True)
    thread.start()
    thread.join(seconds)
    if results:
        return results[0]
    raise NoAnswer(str(errors[0]) if errors else f"no answer in {seconds:g} s") from None


class StatusStore:
    """Store of one status for each rank, and of an entry that ends the run.

    If the store's server is stopped, a call to it never returns. No method here takes longer than `patience`.
    After one call without an answer all later calls fail at once.

    Args:
        store: a separate connection, because a call that waits blocks all others on its connection.
        patience: time-out of one call in seconds.
    """

    def __init__(self, store: Store, rank: int, world_size: int, patience: float) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._patience = patience
        self._is_silent = False

    def post(self, status: RankStatus) -> None:
        """Replace this rank's status."""
        text = status.to_json()
        self._call(lambda: self._store.set(f"{_PREFIX}/{self._rank}", text))

    def read(self) -> dict[int, RankStatus]:
        """Return the statuses of all ranks that have posted one."""
        return {status.rank: status for status in self._call(self._read)}

    def end_run(self, num_ranks: int) -> bool:
        """End the run, and return whether this rank was the first to do so: the first prints the report.

        Args:
            num_ranks: number of ranks that will read it.
        """

        def end() -> bool:
            is_first = self._store.add(_NUM_REPORTS, 1) == 1
            self._store.set(_END, str(num_ranks))
            return is_first

        return self._call(end)

    def num_ranks_at_end(self) -> int | None:
        """Return the number of ranks that must read the run's end; None while the run continues."""
        return self._call(lambda: int(self._store.get(_END)) if self._store.check([_END]) else None)

    def post_ready(self) -> None:
        """Count this rank as ready to exit."""
        self._call(lambda: self._store.add(_NUM_READY, 1))

    def num_ready(self) -> int:
        """Return the number of ranks that are ready to exit."""
        return self._call(lambda: self._store.add(_NUM_READY, 0))

    def _read(self) -> list[RankStatus]:
        keys = [f"{_PREFIX}/{rank}" for rank in range(self._world_size)]
        posted = [key for key in keys if self._store.check([key])]
        return [RankStatus.from_json(text) for text in self._store.multi_get(posted)]

    def _call(self, function: Callable[[], T]) -> T:
        if self._is_silent:
            raise NoAnswer("no answer to an earlier call")
        try:
            return call_within(self._patience, function)
        except NoAnswer:
            self._is_silent = True
            raise


def store_owner() -> str:
    """Name the process that serves the store."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return f"torchrun's agent on {os.environ.get('MASTER_ADDR')}"
    return "rank 0"


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
