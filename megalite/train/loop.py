"""The training loop, and the hooks that callbacks implement."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from megalite.errors import UserError, check_call, kind_of
from megalite.log import log
from megalite.train.stopping import Stop, StopConditions
from megalite.train.telemetry.metrics import ValidationMetrics
from megalite.train.train_step import StepResult
from megalite.train.trainer import Trainer


class Callback:
    """Extends the training loop: logging, evaluation, checkpoints, profiling, or your own work.

    Hooks run in the order of the list, `on_end` in reverse. Every rank calls every hook, so a hook may
    communicate. Only the time of `after_step` counts as time of the iteration.

    To stop the run, call `loop.request_stop` on every rank. The run ends after the iteration's last hook.
    """

    @contextmanager
    def running(self, loop: TrainingLoop) -> Iterator[None]:
        """Wrap the whole run. Override it instead of `on_start` and `on_end` to clean up after errors."""
        self.on_start(loop)
        yield
        self.on_end(loop)

    def on_start(self, loop: TrainingLoop) -> None:
        """Run before the first iteration."""

    def before_step(self, loop: TrainingLoop) -> None:
        """Run before each iteration; `loop.next_iteration` is its number."""

    def after_step(self, loop: TrainingLoop, result: StepResult) -> None:
        """Run after each iteration, as a part of it."""

    def after_iteration(self, loop: TrainingLoop, result: StepResult) -> None:
        """Run between two iterations."""

    def on_evaluation(self, loop: TrainingLoop, metrics: ValidationMetrics) -> None:
        """Run after each evaluation, with its result."""

    def on_save(self, loop: TrainingLoop) -> None:
        """Run after a checkpoint was saved, or after its save in the background has begun."""

    def on_end(self, loop: TrainingLoop) -> None:
        """Run after the last iteration, unless an error has ended the run.

        Callbacks end in the reverse order of the list.
        """


HOOKS = {name: hook for name, hook in vars(Callback).items() if not name.startswith("_")}
"""Names of a callback's hooks."""


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Check that each callback is a Callback, and that its hooks accept their arguments.

    Raises:
        UserError: a callback has another type, overrides no hook, or overrides one with other arguments.
    """
    if not isinstance(callbacks, Sequence):
        raise UserError(f"callbacks is {kind_of(callbacks)}: pass a list of callbacks")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise UserError(f"callbacks holds {kind_of(callback)}: pass instances of subclasses of Callback")
        name = type(callback).__name__
        own = [hook for hook in HOOKS if getattr(type(callback), hook) is not HOOKS[hook]]
        if not own:
            raise UserError(f"{name} overrides no hook of Callback: define one of {', '.join(HOOKS)}")
        for hook in own:
            _, *arguments = inspect.signature(HOOKS[hook]).parameters
            check_call(getattr(callback, hook), f"{name}.{hook}", *arguments)


class TrainingLoop:
    """Trains to the run's last iteration or to a stop condition.

    Attributes:
        num_iterations: number of iterations of the whole run.
        stop: why the run ends before its last iteration; None while it continues, and once it is finished.
    """

    def __init__(
        self, trainer: Trainer, stop_conditions: StopConditions, callbacks: Sequence[Callback]
    ) -> None:
        self.trainer = trainer
        self.stop_conditions = stop_conditions
        self.callbacks = tuple(callbacks)
        self.num_iterations = trainer.config.num_iterations(trainer.topology.dp.size)
        self.stop: Stop | None = None

    @property
    def iteration(self) -> int:
        """Return the number of the last finished iteration, from 1; 0 before the first."""
        return self.trainer.progress.iteration

    @property
    def next_iteration(self) -> int:
        """Return the number of the next iteration."""
        return self.iteration + 1

    @property
    def is_finished(self) -> bool:
        """Return whether the run's last iteration is finished."""
        return self.iteration >= self.num_iterations

    def request_stop(self, stop: Stop | None) -> None:
        """Stop the run after this iteration, unless it is the last one or the run is already stopping."""
        if self.stop is None and not self.is_finished:
            self.stop = stop

    def run(self) -> Stop | None:
        """Train. Return why the run ended early, or None if it is finished."""
        with ExitStack() as stack:
            self.stop = self.stop_conditions.now()
            for callback in self.callbacks:
                stack.enter_context(callback.running(self))
            while self.stop is None and not self.is_finished:
                self._run_iteration()
        return self.stop

    def _run_iteration(self) -> None:
        for callback in self.callbacks:
            callback.before_step(self)
        result = self.trainer.step()
        if not self.is_finished:
            self.request_stop(self.stop_conditions.after(self.iteration))
        for callback in self.callbacks:
            callback.after_step(self, result)
        for callback in self.callbacks:
            callback.after_iteration(self, result)


def train(trainer: Trainer, stop_conditions: StopConditions, callbacks: Sequence[Callback]) -> int:
    """Train from the trainer's progress to the end of the run or to a stop condition.

    Returns:
        The exit status of the process.
    """
    stop_conditions.signals.hold()
    requeue_note = stop_conditions.signals.requeue_note
    requeue_note.remove()
    loop = TrainingLoop(trainer, stop_conditions, callbacks)
    stop = loop.run()
    if stop is None:
        return 0
    when = f"after iteration {loop.iteration}" if loop.iteration else "before the first iteration"
    log.info("exiting %s: %s", when, stop.reason)
    if not trainer.config.checkpoint.save:
        log.warning("nothing is saved: there is no --save folder")
    if stop.wants_requeue:
        requeue_note.write(f"{when}: {stop.reason}")
    return stop.status


def is_due(iteration: int, interval: int | None) -> bool:
    """Return whether an event is due that happens every `interval` iterations; None and 0 mean never."""
    return interval is not None and interval > 0 and iteration % interval == 0
