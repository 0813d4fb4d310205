"""Watch the ranks: end a run that makes no progress, and log the slowest rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from megalite.train.health.straggler import straggler_log
from megalite.train.health.watchdog import watched
from megalite.train.loop import Callback, TrainingLoop
from megalite.train.train_step import StepResult


class HangWatchdog(Callback):
    """Watchdog that ends the run if no rank makes progress for --hang-timeout."""

    @contextmanager
    def running(self, loop: TrainingLoop) -> Iterator[None]:
        with watched(loop.trainer):
            yield


class Stragglers(Callback):
    """Log of the slowest rank every --log-straggler-interval iterations."""

    def on_start(self, loop: TrainingLoop) -> None:
        self._log = straggler_log(loop.trainer.config.logging, loop.trainer.topology)
        self._iteration = ExitStack()

    def before_step(self, loop: TrainingLoop) -> None:
        self._iteration.enter_context(self._log.iteration(loop.next_iteration))

    def after_step(self, loop: TrainingLoop, result: StepResult) -> None:
        self._iteration.close()
