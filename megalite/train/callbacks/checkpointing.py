"""Save checkpoints at intervals and at the run's end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megalite.train.loop import Callback, TrainingLoop, is_due
from megalite.train.train_step import StepResult


class Checkpointing(Callback):
    """Saves every --save-interval iterations, at the end, and non-persistently in between.

    It is the last of the callbacks, so that it knows whether another one has stopped the run.
    """

    @contextmanager
    def running(self, loop: TrainingLoop) -> Iterator[None]:
        with loop.trainer.saver.training_from(loop.iteration):
            yield

    def after_iteration(self, loop: TrainingLoop, result: StepResult) -> None:
        trainer, config = loop.trainer, loop.trainer.config.checkpoint
        trainer.saver.poll()
        ends = loop.stop is not None or loop.is_finished
        if ends or is_due(loop.iteration, config.save_interval):
            if config.save:
                trainer.save(is_last=ends)
                for callback in loop.callbacks:
                    callback.on_save(loop)
            else:  # what the metrics say came from the data, too
                trainer.verify_data()
            if not ends:
                loop.request_stop(loop.stop_conditions.now())
        elif is_due(loop.iteration, config.non_persistent_save_interval):
            trainer.save_local()
