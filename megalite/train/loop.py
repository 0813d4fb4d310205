"""The training loop, its hooks, and the callbacks that save, evaluate and collect garbage at intervals."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from megalite.checkpoint.progress import CallbackStates, recorded_state
from megalite.config import CheckpointConfig
from megalite.data.microbatch import LM_LOSS
from megalite.train.stopping import TEMPORARY_FAILURE, Stop, StopConditions, Stopped
from megalite.train.telemetry.metrics import ValidationMetrics
from megalite.train.train_step import StepResult
from megalite.train.trainer import LayoutChange, Relayout, Trainer
from megalite.utils.log import log


class Callback:
    """Extends the training loop: logging, evaluation, checkpoints, profiling, or your own work.

    Hooks run in the order of the list, `on_end` in reverse. Every rank calls every hook, so a hook may
    communicate. Only the time of `after_step` counts as time of the iteration.

    On a GPU, the next iteration's forward and backward are queued before the hooks of this one run, and the
    GPU computes them meanwhile: see `needs_boundary`.

    To stop the run, call `loop.request_stop` on every rank. The run ends after the iteration's last hook.
    `loop.evaluate` and `loop.save` evaluate and save at any time, on every rank, and notify all callbacks.

    A callback whose decisions depend on earlier iterations overrides `state` and `load_state`, so that a
    resumed run continues with them.
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

    def needs_boundary(self, loop: TrainingLoop, iteration: int) -> bool:
        """Return whether the iteration after this one begins only after the hooks between the two.

        By default it does if the callback has such hooks. Return False if they only use the result, or read
        weights and optimizer state: at that time, the gradients may be those of the next iteration, and what
        `before_step` changes comes too late for its forward. They may still stop the run, evaluate and save.

        It is called before the iteration, and must return the same on every rank.
        """
        return any(overrides(self, hook) for hook in ("before_step", "after_step", "after_iteration"))

    def before_layout_change(self, loop: TrainingLoop) -> None:
        """Run before the layout changes, between two iterations. Let go of modules and optimizer state."""

    def after_layout_change(self, loop: TrainingLoop, change: LayoutChange) -> None:
        """Run after the layout has changed: `loop.trainer` has other chunks and another optimizer."""

    def on_evaluation(self, loop: TrainingLoop, metrics: ValidationMetrics) -> None:
        """Run after each evaluation, with its result."""

    def on_save(self, loop: TrainingLoop) -> None:
        """Run after a checkpoint was saved, or after its save in the background has begun."""

    def state(self) -> dict[str, Any]:
        """Return the state to save in each checkpoint, under the name of the class: a dict of JSON's types.

        It must be the same on every rank. Every rank calls this, and rank 0's state is saved.
        """
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state` of a checkpoint, on every rank, before `running` and `on_start`.

        It is not called in a new run, or if the checkpoint has no state of this callback.
        """

    def on_end(self, loop: TrainingLoop) -> None:
        """Run after the last iteration, unless an error has ended the run.

        Callbacks end in the reverse order of the list.
        """


HOOKS = {name: hook for name, hook in vars(Callback).items() if not name.startswith("_")}
"""Names of a callback's hooks."""


def overrides(callback: Callback, hook: str) -> bool:
    """Return whether a callback has a hook of its own."""
    return getattr(type(callback), hook) is not HOOKS[hook]


class TrainingLoop:
    """Trains to the run's last iteration or to a stop condition.

    Args:
        layouts: what changes the layout, by the iteration after which it does. A run that resumes later
            begins with the newest of them.
        requested_layout: called when the file of --layout-file exists; returns what changes the layout.

    Attributes:
        num_iterations: number of iterations of the whole run.
        stop: why the run ends before its last iteration; None while it continues, and once it is finished.
        queues_next: queue the next iteration's gradients before the hooks of this one run, if no callback
            needs the boundary. By default on a GPU. A CPU computes them at once, so the hooks would be late.
    """

    def __init__(
        self,
        trainer: Trainer,
        stop_conditions: StopConditions,
        callbacks: Sequence[Callback],
        layouts: Mapping[int, Relayout] | None = None,
        requested_layout: Callable[[], Relayout | None] = lambda: None,
    ) -> None:
        self.trainer = trainer
        self.stop_conditions = stop_conditions
        self._callbacks = tuple(callbacks)
        self._layouts = dict(layouts or {})
        self._requested_layout = requested_layout
        self._request_due: int | None = None
        self.num_iterations = trainer.config.num_iterations(trainer.topology.sample_ranks.size)
        self.stop: Stop | None = None
        self.queues_next = trainer.topology.device.type == "cuda" and trainer.can_queue_next

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

    @property
    def is_ending(self) -> bool:
        """Return whether the run ends after this iteration, finished or not."""
        return self.stop is not None or self.is_finished

    def request_stop(self, stop: Stop | None) -> None:
        """Stop the run after this iteration, unless it is the last one or the run is already stopping."""
        if self.stop is None and not self.is_finished:
            self.stop = stop

    def evaluate(self, split: str) -> None:
        """Evaluate on each dataset of a split, and notify the callbacks; an urgent stop interrupts it.

        With --ema-decay, the average of the weights is evaluated after the weights.

        Args:
            split: "valid" or "test".
        """
        trainer = self.trainer
        if trainer.evaluator.num_batches == 0:
            return
        try:
            for metrics in self._evaluations(split):
                self._notify(metrics)
            if trainer.optimizer.averages is None:
                return
            with trainer.averaged_weights():
                of_average = [replace(each, is_of_average=True) for each in self._evaluations(split)]
        except Stopped as stopped:
            log.warning("the evaluation at iteration %d was interrupted: it has no result", self.iteration)
            self.stop = stopped.stop
            return
        for metrics in of_average:  # outside of the block: a callback may save
            self._notify(metrics)

    def _evaluations(self, split: str) -> Iterator[ValidationMetrics]:
        """Yield the result of each dataset of a split.

        Raises:
            Stopped: an urgent stop interrupts the evaluation.
        """
        trainer, progress = self.trainer, self.trainer.progress
        first_sample = trainer.evaluator.first_sample(split, progress.iteration)
        for name, dataset in trainer.datasets.evaluated(split):
            with trainer.timers("eval-time"):
                num_samples = trainer.evaluator.num_samples(split, dataset)
                losses = trainer.evaluate(
                    dataset, first_sample, self.stop_conditions.raise_if_urgent, num_samples=num_samples
                )
            yield ValidationMetrics(
                progress.iteration,
                progress.consumed_samples,
                split,
                losses.pop(LM_LOSS),
                name,
                other_losses=losses,
            )

    def _notify(self, metrics: ValidationMetrics) -> None:
        for callback in self._callbacks:
            callback.on_evaluation(self, metrics)

    def save(self) -> None:
        """Save a checkpoint with the callbacks' states, and notify the callbacks; see `Trainer.save`."""
        self.trainer.save(is_last=self.is_ending, callbacks=self.states())
        for callback in self._callbacks:
            callback.on_save(self)

    def save_local(self) -> None:
        """Make a non-persistent save with the callbacks' states; see `Trainer.save_local`."""
        self.trainer.save_local(self.states())

    def states(self) -> dict[str, str]:
        """Return the states of the callbacks that have one, as JSON, by the name of the class.

        Raises:
            UserError: a checkpoint cannot hold one of them.
        """
        return {name: recorded_state(name, callback.state()) for name, callback in self._with_state().items()}

    def load_states(self, states: CallbackStates) -> None:
        """Load the callbacks' states from a checkpoint; log those that only one of the two runs has."""
        here = self._with_state()
        for name, callback in here.items():
            if name in states:
                callback.load_state(states[name])
            else:
                log.info("the checkpoint has no state of callback %s: it begins anew", name)
        for name in sorted(states.keys() - here.keys()):
            log.warning("the checkpoint's state of callback %s is not used: this run has none", name)

    def _with_state(self) -> dict[str, Callback]:
        return {type(each).__name__: each for each in self._callbacks if overrides(each, "state")}

    def run(self) -> Stop | None:
        """Train. Return why the run ended early, or None if it is finished."""
        with ExitStack() as stack:
            self.stop = self.stop_conditions.now()
            for callback in self._callbacks:
                stack.enter_context(callback.running(self))
            self.states()  # reports a state that cannot be saved now, rather than at the first save
            waiting = [
                type(each).__name__
                for each in self._callbacks
                if not overrides(each, "needs_boundary") and each.needs_boundary(self, self.next_iteration)
            ]
            if self.queues_next and waiting:
                log.info("no iteration is queued before the hooks of %s (needs_boundary)", ", ".join(waiting))
            while not self.is_ending:
                self._change_layout_if_due()
                self._run_iteration()
        return self.stop

    def _change_layout_if_due(self) -> None:
        relayout = None
        if passed := [iteration for iteration in self._layouts if iteration <= self.iteration]:
            relayout = self._layouts[max(passed)]
            for iteration in passed:
                del self._layouts[iteration]
        elif self._request_due is not None and self._request_due <= self.iteration:
            self._request_due = None
            relayout = self._requested_layout()
        if relayout is None:
            return
        for callback in self._callbacks:
            callback.before_layout_change(self)
        change = relayout(self.trainer)
        log.info(
            "layout after iteration %d: %s instead of %s; the change took %.1f s, and the ranks sent %.3f GB",
            *(self.iteration, change.after, change.before, change.seconds, change.num_bytes / 1e9),
        )
        for callback in self._callbacks:
            callback.after_layout_change(self, change)

    def _run_iteration(self) -> None:
        for callback in self._callbacks:
            callback.before_step(self)
        result = self.trainer.step(queues_next=self._may_queue_next())
        if not self.is_finished:
            self.request_stop(self.stop_conditions.after(self.iteration))
        if self.stop_conditions.has_layout_file and self._request_due is None:
            self._request_due = self.iteration + self.queues_next  # the next one may be queued in this layout
        for callback in self._callbacks:
            callback.after_step(self, result)
        for callback in self._callbacks:
            callback.after_iteration(self, result)

    def _may_queue_next(self) -> bool:
        """Return whether to queue an iteration before the hooks of the one before it run."""
        iteration, exit_interval = self.next_iteration, self.trainer.config.training.exit_interval
        # An iteration is queued in the layout of the one before it.
        is_last = iteration in (self.num_iterations, self._request_due, *self._layouts)
        if not self.queues_next or is_last or is_due(iteration, exit_interval):
            return False
        return not any(callback.needs_boundary(self, iteration) for callback in self._callbacks)


def train(
    trainer: Trainer,
    stop_conditions: StopConditions,
    callbacks: Sequence[Callback],
    states: CallbackStates | None = None,
    layouts: Mapping[int, Relayout] | None = None,
    requested_layout: Callable[[], Relayout | None] = lambda: None,
) -> int:
    """Train from the trainer's progress to the end of the run or to a stop condition.

    Args:
        states: the callbacks' states in the checkpoint that was loaded; None for a new run.
        layouts, requested_layout: see `TrainingLoop`.

    Returns:
        The exit status of the process.
    """
    stop_conditions.signals.hold()
    requeue_note = stop_conditions.signals.requeue_note
    requeue_note.remove()
    loop = TrainingLoop(trainer, stop_conditions, callbacks, layouts, requested_layout)
    if states is not None:
        loop.load_states(states)
    stop = loop.run()
    if stop is None and trainer.saver.has_left:  # not all that was requested is done
        reason = "an upload is left to the next start"
        stop = Stop(reason, TEMPORARY_FAILURE, wants_requeue=True, is_urgent=True)
    if stop is None:
        return 0
    when = f"after iteration {loop.iteration}" if loop.iteration else "before the first iteration"
    log.info("%s%s: %s", "" if stop.regroups else "exiting ", when, stop.reason)
    if not trainer.config.checkpoint.save:
        log.warning("nothing is saved: there is no --save folder")
    elif stop.is_urgent:
        log.info("%s", _how_to_resume(trainer.config.checkpoint))
    if stop.wants_requeue:
        requeue_note.write(f"{when}: {stop.reason}")
    return stop.status


def _how_to_resume(checkpoint: CheckpointConfig) -> str:
    load = "" if checkpoint.loads_own else f" with --load {checkpoint.save}"
    without = f"{' and' if load else ''} without --finetune" if checkpoint.finetune else ""
    return f"to resume, run the same command{load or ' again'}{without}"


def is_due(iteration: int, interval: int | None) -> bool:
    """Return whether an event is due that happens every `interval` iterations; None and 0 mean never."""
    return interval is not None and interval > 0 and iteration % interval == 0


class Checkpointing(Callback):
    """Callback that saves at intervals of iterations or minutes and at the end, non-persistently in between.

    It is the last of the callbacks, so that it knows whether another one has stopped the run.
    """

    def __init__(self) -> None:
        self._saved_at = self._saved_locally_at = 0.0  # ages of the run in minutes, the same on every rank

    @contextmanager
    def running(self, loop: TrainingLoop) -> Iterator[None]:
        self._saved_at = self._saved_locally_at = loop.stop_conditions.minutes
        with loop.trainer.saver.training_from(loop.iteration):
            yield

    def needs_boundary(self, loop: TrainingLoop, iteration: int) -> bool:
        config = loop.trainer.config.checkpoint
        intervals = config.save_interval, config.non_persistent_save_interval
        return any(is_due(iteration, interval) for interval in intervals)

    def after_iteration(self, loop: TrainingLoop, result: StepResult) -> None:
        trainer, config = loop.trainer, loop.trainer.config.checkpoint
        trainer.saver.poll()
        # Processes that form a new group need no persistent checkpoint, if there are non-persistent ones.
        regroups = loop.stop is not None and loop.stop.regroups
        is_last = loop.is_ending and not (regroups and config.saves_locally)
        minutes = loop.stop_conditions.minutes
        is_late = _has_passed(config.save_interval_minutes, minutes - self._saved_at)
        if is_last or is_late or is_due(loop.iteration, config.save_interval):
            if config.save:
                loop.save()
            else:  # the data influenced the metrics too
                trainer.verify_data()
            if not loop.is_ending:
                loop.request_stop(loop.stop_conditions.now())
                self._saved_at = self._saved_locally_at = loop.stop_conditions.minutes
        elif (
            regroups
            or is_due(loop.iteration, config.non_persistent_save_interval)
            or _has_passed(config.non_persistent_save_interval_minutes, minutes - self._saved_locally_at)
        ):
            if regroups:
                trainer.saver.finish()  # a save that is due while another one runs is skipped
            loop.save_local()
            self._saved_locally_at = minutes


def _has_passed(interval: float | None, minutes: float) -> bool:
    """Return whether an interval of minutes, if there is one, has passed when ranks last compared clocks."""
    return interval is not None and minutes >= interval


class Evaluation(Callback):
    """Evaluation every --eval-interval iterations, and once the run is finished."""

    def needs_boundary(self, loop: TrainingLoop, iteration: int) -> bool:
        return is_due(iteration, loop.trainer.config.training.eval_interval)

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

    def needs_boundary(self, loop: TrainingLoop, iteration: int) -> bool:
        return False

    def before_layout_change(self, loop: TrainingLoop) -> None:
        if self._may_freeze:
            gc.unfreeze()  # the old model is garbage soon
        self._first_iteration = loop.next_iteration

    def _collect_and_freeze(self) -> None:
        gc.collect()
        if self._may_freeze:
            gc.freeze()

    def after_step(self, loop: TrainingLoop, result: StepResult) -> None:
        config = loop.trainer.config.training
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
        return config.manual_gc_eval and loop.trainer.evaluator.num_batches > 0
