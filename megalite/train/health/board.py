"""Where ranks tell each other how they stand, by the store of the process group, whatever becomes of it."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, TypeVar

from megalite.train.health.standing import Standing

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

_PREFIX = "megalite/watchdog"
_OVER = f"{_PREFIX}/over"
_TOLD = f"{_PREFIX}/told"


class Silence(RuntimeError):
    """The other side did not answer in time."""


def within(seconds: float, function: Callable[[], T]) -> T:
    """Calls a function that may never return, in a thread that is then left behind.

    Raises:
        Silence: it did not return in time, or raised.
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
    raise Silence(str(errors[0]) if errors else f"no answer in {seconds:g} s") from None


class Board:
    """One entry for each rank, which that rank alone writes, and a last one that ends the run.

    A store whose server is stopped keeps its callers for good; nothing here takes longer than `patience`.
    After one such call no other is made: it would wait for the same.

    Args:
        store: a connection that nobody else uses: a call that waits keeps all others of its connection.
        patience: seconds for one call.
    """

    def __init__(self, store: Store, rank: int, world_size: int, patience: float) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._patience = patience
        self._is_silent = False

    def post(self, standing: Standing) -> None:
        """Replaces this rank's entry."""
        text = json.dumps(asdict(standing))
        self._call(lambda: self._store.set(f"{_PREFIX}/{self._rank}", text))

    def read(self) -> dict[int, Standing]:
        """The entries of all ranks that have made one."""
        return {each.rank: each for each in self._call(self._read)}

    def end(self, num_ranks: int) -> None:
        """Tells the ranks that the run is over, and how many are there to hear it."""
        self._call(lambda: self._store.set(_OVER, str(num_ranks)))

    def num_at_end(self) -> int | None:
        """How many ranks are there to hear that the run is over; None while it is not."""

        def ask() -> int | None:
            return int(self._store.get(_OVER)) if self._store.check([_OVER]) else None

        return self._call(ask)

    def leave(self) -> None:
        """Counts this rank among those that are ready to exit."""
        self._call(lambda: self._store.add(_TOLD, 1))

    def num_leaving(self) -> int:
        """How many ranks have said so."""
        return self._call(lambda: self._store.add(_TOLD, 0))

    def _read(self) -> list[Standing]:
        keys = [f"{_PREFIX}/{rank}" for rank in range(self._world_size)]
        made = [key for key in keys if self._store.check([key])]
        return [Standing.of(json.loads(text)) for text in self._store.multi_get(made)]

    def _call(self, function: Callable[[], T]) -> T:
        if self._is_silent:
            raise Silence("no answer before")
        try:
            return within(self._patience, function)
        except Silence:
            self._is_silent = True
            raise


def store_owner() -> str:
    """Whose process serves the store, in words."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return f"torchrun's agent on {os.environ.get('MASTER_ADDR')}"
    return "rank 0"
