"""Who is told when something begins and ends on this rank: a trace, timers, the watchdog."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol, TypeVar

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class Observer(Protocol[T_contra]):
    """Told of each beginning and of its end, in the order in which they nest."""

    def begins(self, what: T_contra) -> None:
        """It is next; of a pipeline's action, the input may still be on its way."""

    def ends(self, what: T_contra) -> None:
        """It is over, as far as the host knows."""


class Wait(NamedTuple):
    """A wait for other ranks.

    Attributes:
        axis: name of the mesh axis that they lie along.
        what: the collective, or the message.
    """

    axis: str
    what: str


@contextmanager
def observed(observers: Sequence[Observer[T]], what: T) -> Iterator[None]:
    """Tells the observers that the block is what begins and ends, also where it raises."""
    for observer in observers:
        observer.begins(what)
    try:
        yield
    finally:
        for observer in observers:
            observer.ends(what)
