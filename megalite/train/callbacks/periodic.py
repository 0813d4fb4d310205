"""Callbacks that save and evaluate at intervals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megalite.train.loop import Callback, TrainingLoop, is_due
from megalite.train.train_step import StepResult


class Checkpointing(Callback):
    """Callback that saves at intervals of iterations or minutes and at the end, non-persistently in between.

    It is the last of the callbacks, so that it knows whether another one has stopped the run.
    """

    def __init__(self) -> None:
        self._saved_at = 0.0  # age of the run in minutes, the same on every rank

    @contextmanager
    def running(self, loop: TrainingLoop) -> Iterator[None]:
        self._saved_at = loop.stop_conditions.minutes
        with loop.trainer.saver.training_from(loop.iteration):
            yield

    def after_iteration(self, loop: TrainingLoop, result: StepResult) -> None:
        trainer, config = loop.trainer, loop.trainer.config.checkpoint
        trainer.saver.poll()
        if loop.is_ending or is_due(loop.iteration, config.save_interval) or self._is_late(loop):
            if config.save:
                loop.save()
            else:  # the data influenced the metrics too
                trainer.verify_data()
            if not loop.is_ending:
                loop.request_stop(loop.stop_conditions.now())
                self._saved_at = loop.stop_conditions.minutes
        elif is_due(loop.iteration, config.non_persistent_save_interval):
            loop.save_local()

    def _is_late(self, loop: TrainingLoop) -> bool:
        """Return whether the last save was --save-interval-minutes ago, when ranks last compared clocks."""
        interval = loop.trainer.config.checkpoint.save_interval_minutes
        return interval is not None and loop.stop_conditions.minutes - self._saved_at >= interval


class Evaluation(Callback):
    """Evaluation every --eval-interval iterations, and once the run is finished."""

    def after_iteration(self, loop: TrainingLoop, result: StepResult) -> None:
        is_urgent = loop.stop is not None and loop.stop.is_urgent
        if is_due(loop.iteration, loop.trainer.config.training.eval_interval) and not is_urgent:
            loop.evaluate("valid")

    def on_end(self, loop: TrainingLoop) -> None:
        if loop.stop is None and not is_due(loop.iteration, loop.trainer.config.training.eval_interval):
            loop.evaluate("valid")
        if loop.stop is None:
            loop.evaluate("test")
