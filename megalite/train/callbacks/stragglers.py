"""Log the slowest rank at intervals."""

from __future__ import annotations

from contextlib import ExitStack

from megalite.train.health.straggler import straggler_log
from megalite.train.loop import Callback, TrainingLoop
from megalite.train.train_step import StepResult


class Stragglers(Callback):
    """Logs the slowest rank every --log-straggler-interval iterations."""

    def on_start(self, loop: TrainingLoop) -> None:
        self._log = straggler_log(loop.trainer.config.logging, loop.trainer.topology)
        self._iteration = ExitStack()

    def before_step(self, loop: TrainingLoop) -> None:
        self._iteration.enter_context(self._log.iteration(loop.next_iteration))

    def after_step(self, loop: TrainingLoop, result: StepResult) -> None:
        self._iteration.close()
