"""End a run that makes no progress."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megalite.train.health.watchdog import watched
from megalite.train.loop import Callback, TrainingLoop


class HangWatchdog(Callback):
    """Ends the run if no rank makes progress for --hang-timeout."""

    @contextmanager
    def running(self, loop: TrainingLoop) -> Iterator[None]:
        with watched(loop.trainer):
            yield
