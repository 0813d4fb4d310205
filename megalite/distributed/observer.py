"""Events that begin and end on this rank, and their observers: timers, a trace, the watchdog."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol, TypeVar

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)

CHECKPOINT = "checkpoint I/O"
"""Event: a checkpoint is read or written, or a save in the background is waited for."""
PROFILER = "collecting a profile"
"""Event: a profiler's trace is collected or written."""
DEVICE = "waiting for the device"
"""Event: the host waits for kernels that it launched, collectives included."""
HOST_UPDATE = "waiting for the update of offloaded optimizer state"
"""Event: forward, or whoever reads the weights, waits for a thread that updates them."""
STORE_BARRIER = "store barrier"
"""Value of `Wait.what`: ranks wait for each other in the store, for as long as one of them works."""


class Observer(Protocol[T_contra]):
    """Receives the beginning and end of each event, in the order in which events nest."""

    def begins(self, what: T_contra) -> None:
        """Handle an event's beginning; the input of a pipeline's action may still be on its way."""

    def ends(self, what: T_contra) -> None:
        """Handle an event's end, as far as the host knows."""


class Wait(NamedTuple):
    """A wait for other ranks.

    Attributes:
        axis: name of the mesh axis that connects them.
        what: the collective, or the kind of message.
        of: the data that it carries: text, or a pipeline's action that reads a message.
        peer: rank at the other end of a message; None in a collective.
    """

    axis: str
    what: str
    of: object = ""
    peer: int | None = None


class EventStack:
    """The events of this process that have begun and not ended; an observer of any event.

    One thread posts at a time: the main thread, or autograd's while the main thread waits for it. Other
    threads may read.
    """

    def __init__(self) -> None:
        self._open: list[object] = []

    def begins(self, what: object) -> None:
        self._open.append(what)

    def ends(self, what: object) -> None:
        while self._open and self._open.pop() != what:
            pass  # an exception ended it

    def during(self, what: object) -> AbstractContextManager[None]:
        """Post an event that begins and ends with the block."""
        return observed((self,), what)

    def now(self) -> tuple[object, ...]:
        """Return the open events, outermost first; any thread may call it."""
        return tuple(self._open)


@contextmanager
def observed(observers: Sequence[Observer[T]], what: T) -> Iterator[None]:
    """Post an event that begins and ends with the block, even if the block raises."""
    for observer in observers:
        observer.begins(what)
    try:
        yield
    finally:
        for observer in observers:
            observer.ends(what)
