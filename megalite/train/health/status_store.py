"""Exchange the ranks' statuses through the process group's store, with a time-out on every call."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from megalite.train.health.rank_status import RankStatus

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
