"""Evaluate on the validation split at intervals, and on both splits at the run's end."""

from __future__ import annotations

from megalite.log import log
from megalite.train.loop import Callback, TrainingLoop, is_due
from megalite.train.stopping import Stopped
from megalite.train.telemetry.metrics import ValidationMetrics
from megalite.train.train_step import StepResult


class Evaluation(Callback):
    """Evaluates every --eval-interval iterations, and once the run is finished."""

    def after_iteration(self, loop: TrainingLoop, result: StepResult) -> None:
        is_urgent = loop.stop is not None and loop.stop.is_urgent
        if is_due(loop.iteration, loop.trainer.config.training.eval_interval) and not is_urgent:
            self._evaluate(loop, "valid")

    def on_end(self, loop: TrainingLoop) -> None:
        if loop.stop is None and not is_due(loop.iteration, loop.trainer.config.training.eval_interval):
            self._evaluate(loop, "valid")
        if loop.stop is None:
            self._evaluate(loop, "test")

    def _evaluate(self, loop: TrainingLoop, split: str) -> None:
        """Evaluate on each of the split's datasets; an urgent stop interrupts it."""
        trainer, progress = loop.trainer, loop.trainer.progress
        if trainer.evaluator.num_batches == 0:
            return
        first_sample = trainer.evaluator.first_sample(split, progress.iteration)
        for name, dataset in trainer.datasets.evaluated(split):
            try:
                with trainer.timers("eval-time"):
                    losses = trainer.evaluate(dataset, first_sample, loop.stop_conditions.raise_if_urgent)
            except Stopped as stopped:
                log.warning(
                    "the evaluation at iteration %d was interrupted: it has no result", progress.iteration
                )
                loop.stop = stopped.stop
                return
            metrics = ValidationMetrics(
                progress.iteration, progress.consumed_samples, split, name=name, **losses
            )
            for callback in loop.callbacks:
                callback.on_evaluation(loop, metrics)
