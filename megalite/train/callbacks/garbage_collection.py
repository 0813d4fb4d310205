"""Collect Python's garbage between iterations instead of within them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from megalite.train.loop import Callback, TrainingLoop, is_due
from megalite.train.telemetry.metrics import ValidationMetrics
from megalite.train.train_step import StepResult


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
