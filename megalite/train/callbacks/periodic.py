"""Callbacks that save, evaluate, and collect Python's garbage at intervals."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from megalite.train.loop import Callback, TrainingLoop, is_due
from megalite.train.telemetry.metrics import ValidationMetrics
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


class GarbageCollection(Callback):
    """Collection of Python's garbage every --manual-gc-interval iterations instead of automatic ones.

    Python starts a collection after a number of allocations: on each rank at another time, within a step,
    while the other ranks wait. A full one visits all objects of the process. With this callback, all ranks
    collect at the same iterations. Objects that exist after the first iteration are frozen: later collections
    do not visit them. When the run ends, even with an error, the collector is as it was before.
    """

    @contextmanager
    def running(self, loop: TrainingLoop) -> Iterator[None]:
        if not loop.trainer.config.training.manual_gc:
            yield
            return
        was_enabled = gc.isenabled()
        # Objects that the program itself has frozen could not be distinguished at the end.
        self._may_freeze = gc.get_freeze_count() == 0
        gc.disable()
        self._collect_and_freeze()
        self._first_iteration = loop.next_iteration
        try:
            yield
        finally:
            if self._may_freeze:
                gc.unfreeze()
            if was_enabled:
                gc.enable()

    def _collect_and_freeze(self) -> None:
        gc.collect()
        if self._may_freeze:
            gc.freeze()

    def after_step(self, loop: TrainingLoop, result: StepResult) -> None:
        config = loop.trainer.config.training
        if not config.manual_gc:
            return
        if loop.iteration == self._first_iteration:
            self._collect_and_freeze()  # the first step imports modules and compiles kernels
        elif is_due(loop.iteration, config.manual_gc_interval):
            gc.collect()

    def after_iteration(self, loop: TrainingLoop, result: StepResult) -> None:
        """Collect before `Evaluation`, which follows in the list of callbacks."""
        if self._collects_around_evaluation(loop) and is_due(
            loop.iteration, loop.trainer.config.training.eval_interval
        ):
            gc.collect()

    def on_evaluation(self, loop: TrainingLoop, metrics: ValidationMetrics) -> None:
        if self._collects_around_evaluation(loop):
            gc.collect()

    def _collects_around_evaluation(self, loop: TrainingLoop) -> bool:
        config = loop.trainer.config.training
        return config.manual_gc and config.manual_gc_eval and loop.trainer.evaluator.num_batches > 0
