"""Evaluate on the validation split at intervals, and on both splits at the run's end."""

from __future__ import annotations

from megalite.train.loop import Callback, TrainingLoop, is_due
from megalite.train.train_step import StepResult


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
