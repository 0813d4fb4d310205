"""What torch.compile takes of an iteration: told once, and no part of the iteration's time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megalite.config import TrainingConfig
from megalite.log import log


class CompileTime:
    """Adds up the seconds in which torch.compile is at work in this process.

    Args:
        clock: seconds from any origin.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._begin = 0.0
        self._seconds = 0.0

    def begin(self, _: object = None) -> None:
        """Is called when a compilation begins; those within it are not told apart."""
        self._begin = self._clock()

    def end(self, _: object = None) -> None:
        """Is called at its end."""
        self._seconds += self._clock() - self._begin

    def take(self) -> float:
        """Seconds since the last call, of which the log tells."""
        seconds, self._seconds = self._seconds, 0.0
        if seconds > 0.0:
            log.info("compiling the layers: %.1f s, left out of the iteration's time", seconds)
        return seconds


@contextmanager
def compile_time(config: TrainingConfig) -> Iterator[CompileTime]:
    """Watches torch.compile in the block, of a run that has its layers compiled."""
    watch = CompileTime()
    if not config.compile:
        yield watch
        return
    from torch._dynamo.callback import callback_handler  # a second that other runs save

    callback_handler.register_start_callback(watch.begin)
    callback_handler.register_end_callback(watch.end)
    try:
        yield watch
    finally:
        callback_handler.remove_start_callback(watch.begin)
        callback_handler.remove_end_callback(watch.end)
