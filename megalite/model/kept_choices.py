"""Repeat forward's choices when backward recomputes a function.

Between two runs, scores that differ by rounding errors alone may change places. Without the kept choice, a
gradient would combine tensors of one choice with those of the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor


class KeptChoices:
    """Holds the choices of a function's first run, in their order, for its second run."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._next: int | None = None  # of the choice to repeat; None in the first run

    @contextmanager
    def first_run(self) -> Iterator[None]:
        """Keep the choices that this thread makes in the block."""
        with _active(self):
            yield

    @contextmanager
    def second_run(self) -> Iterator[None]:
        """Repeat them in the block."""
        self._next = 0
        with _active(self):
            yield

    def choose(self, compute: Callable[[], Tensor]) -> tuple[Tensor, bool]:
        """Return the choice, and whether this is the first run."""
        if self._next is None:
            self._kept.append(compute().detach())
            return self._kept[-1], True
        self._next += 1
        return self._kept[self._next - 1], False


class _ThreadState(threading.local):
    """Holds the choices of the function that this thread runs; a GPU's backward has a thread of its own."""

    choices: KeptChoices | None = None


_THIS_THREAD = _ThreadState()


@contextmanager
def _active(choices: KeptChoices) -> Iterator[None]:
    outer, _THIS_THREAD.choices = _THIS_THREAD.choices, choices
    try:
        yield
    finally:
        _THIS_THREAD.choices = outer


def choose(compute: Callable[[], Tensor]) -> tuple[Tensor, bool]:
    """Return what `compute` returned in forward, and False if this is a second run that repeats it."""
    choices = _THIS_THREAD.choices
    return (compute(), True) if choices is None else choices.choose(compute)
