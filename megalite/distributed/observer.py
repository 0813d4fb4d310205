"""Notify observers (timers, a trace, the watchdog) of events that begin and end on this rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

CHECKPOINT = "checkpoint I/O"
"""Event: the rank reads or writes a checkpoint, or waits for a background save."""
PROFILER = "collecting a profile"
"""Event: the rank collects or writes a profiler trace."""
DEVICE = "waiting for the device"
"""Event: the host waits for kernels that it launched, including collectives."""
HOST_UPDATE = "waiting for the update of offloaded optimizer state"
"""Event: forward, or other code that reads the weights, waits for a thread that updates them."""
STORE_BARRIER = "store barrier"
"""Value of `Wait.what`: ranks wait for each other through the store, for as long as one of them works."""


class Observer(Protocol):
    """Observer of the beginning and end of each event of this rank, in nesting order.

    Events are actions of a pipeline, waits for other ranks, and parts of the program by their timers' names.
    """

    def begins(self, what: Any) -> None:
        """Handle the beginning of an event. The input of a pipeline action may not have arrived yet."""

    def ends(self, what: Any) -> None:
        """Handle the end of an event on the host; device work may still run."""


class Wait(NamedTuple):
    """Wait for other ranks.

    Attributes:
        axis: name of the mesh axis that connects them.
        what: the collective, or the kind of message.
        of: the data: a text, or the pipeline action that reads the message.
        peer: rank at the other end of a message; None in a collective.
    """

    axis: str
    what: str
    of: object = ""
    peer: int | None = None


class EventStack:
    """Events of this process that have begun and not ended; it can observe any event.

    Only one thread posts at a time: the main thread, or one that it waits for (autograd's, or a thread of
    `Turns`). Other threads can read.
    """

    def __init__(self) -> None:
        self._open: list[object] = []

    def begins(self, what: object) -> None:
        self._open.append(what)

    def ends(self, what: object) -> None:
        while self._open and self._open.pop() != what:
            pass  # an exception ended this event

    def during(self, what: object) -> AbstractContextManager[None]:
        """Post an event that begins and ends with the block."""
        return observed((self,), what)

    def now(self) -> tuple[object, ...]:
        """Return the open events, outermost first; any thread can call this."""
        return tuple(self._open)


@contextmanager
def observed(observers: Sequence[Observer], what: object) -> Iterator[None]:
    """Post an event that begins and ends with the block, even if the block raises."""
    for observer in observers:
        observer.begins(what)
    try:
        yield
    finally:
        for observer in observers:
            observer.ends(what)


@contextmanager
def observing(observers: list[Observer], *more: Observer) -> Iterator[None]:
    """Add observers to a list, such as `Topology.observers`, in this block."""
    observers.extend(more)
    try:
        yield
    finally:
        for observer in more:
            observers.remove(observer)
