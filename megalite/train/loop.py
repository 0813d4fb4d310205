"""The training loop: iterate, log, evaluate, save, stop."""

from __future__ import annotations

import math
from dataclasses import replace

from megalite.log import THIS_RANK, log
from megalite.train.health.straggler import straggler_log
from megalite.train.layer_norms import layer_grad_norms
from megalite.train.module_profile import log_module_profile
from megalite.train.profiler import memory_history, profiler
from megalite.train.step import StepResult
from megalite.train.stopping.requeue import RequeueNote
from megalite.train.stopping.stop import Stop, StopConditions, Stopped
from megalite.train.telemetry.compile_time import compile_time
from megalite.train.telemetry.metrics import IntervalMeter, IterationMetrics, ValidationMetrics, paused
from megalite.train.telemetry.writers import Writers
from megalite.train.tracing.pipeline_trace import pipeline_trace
from megalite.train.trainer import Trainer


def train(trainer: Trainer, writers: Writers, stop: StopConditions) -> int:
    """Runs the trainer from where it stands to the end of its run or to a stop condition.

    Returns:
        The status that the process shall exit with.
    """
    save = trainer.config.checkpoint.save
    note = RequeueNote(save if trainer.topology.rank == 0 else None)
    stop.signals.hold()
    note.remove()
    end = _iterate(trainer, writers, stop) or _evaluate_at_the_end(trainer, writers, stop)
    if end is None:
        return 0
    iteration = trainer.progress.iteration
    where = f"after iteration {iteration}" if iteration else "before the first iteration"
    log.info("exiting %s: %s", where, end.reason)
    if not save:
        log.warning("nothing is saved: there is no --save folder")
    if end.wants_requeue:
        note.write(f"{where}: {end.reason}")
    return end.status


def _iterate(trainer: Trainer, writers: Writers, stop: StopConditions) -> Stop | None:
    """Trains up to the run's last iteration; gives what led to an end before it."""
    config, topology = trainer.config, trainer.topology
    num_iterations = config.num_iterations(topology.dp.size)
    meters = {interval: _meter(trainer, num_iterations) for interval in writers.intervals}
    end = stop.now()
    straggler = straggler_log(config.logging, topology)
    with (
        trainer.saver.training_from(trainer.progress.iteration),
        memory_history(config.logging, topology),
        profiler(config.logging, topology, trainer.progress.iteration) as profile,
        pipeline_trace(trainer) as trace,
        compile_time(config.training) as compiling,
    ):
        while end is None and trainer.progress.iteration < num_iterations:
            number = trainer.progress.iteration + 1
            if number == config.logging.profile_modules:
                with paused(meters.values()):
                    log_module_profile(trainer)
            with straggler.iteration(number), trace.iteration(number):
                result = trainer.step()
            profile.step()
            iteration = trainer.progress.iteration
            is_last = iteration == num_iterations
            end = None if is_last else stop.after(iteration)
            seconds = compiling.take()
            for meter in meters.values():
                _add(meter, result)
                meter.leave_time_out(seconds)
            if result.fault and topology.is_reporter:
                log.warning("iteration %d: %s", iteration, result.fault, extra=THIS_RANK)
            for interval, meter in meters.items():
                if end or is_last or _due(iteration, interval):
                    writers.iteration(interval, _metrics(trainer, meter, result), trainer.timers)
            with paused(meters.values()):
                _tell_layer_norms(trainer, writers, result)
                trace.after(iteration)
                if _due(iteration, config.training.eval_interval) and not (end and end.is_urgent):
                    end = evaluate_validation(trainer, writers, stop) or end
                compiling.take()  # the clocks stand already
                trainer.saver.poll()
                ends = end is not None or is_last
                if ends or _due(iteration, config.checkpoint.save_interval):
                    _save(trainer, is_last=ends)
                    end = end or (None if is_last else stop.now())
                elif _due(iteration, config.checkpoint.non_persistent_save_interval):
                    trainer.save_local()
    return end


def _meter(trainer: Trainer, num_iterations: int) -> IntervalMeter:
    topology = trainer.topology
    return IntervalMeter(
        trainer.config.model, num_iterations, topology.world_size, topology.device, topology.tp.size
    )


def _tell_layer_norms(trainer: Trainer, writers: Writers, result: StepResult) -> None:
    """Tells each layer's norm of this iteration's gradient where it is asked for and there is one."""
    logging, iteration = trainer.config.logging, trainer.progress.iteration
    has_gradient = not result.is_left_out and result.fault is None and math.isfinite(result.grad_norm)
    if has_gradient and _due(iteration, logging.log_layer_grad_norms_interval):
        num_layers = trainer.config.model.num_layers
        norms = layer_grad_norms(trainer.optimizer, num_layers, result.grad_norm, trainer.topology)
        writers.layer_norms(iteration, norms)


def _add(meter: IntervalMeter, result: StepResult) -> None:
    if result.is_left_out:
        meter.leave_out()
    else:
        is_told = result.fault is not None
        meter.add(result.loss, result.grad_norm, result.skipped, result.num_samples, is_told=is_told)


def _metrics(trainer: Trainer, meter: IntervalMeter, result: StepResult) -> IterationMetrics:
    """The interval's figures, with the whole run's and those of weights and gradient that are asked for."""
    progress, logging = trainer.progress, trainer.config.logging
    # An iteration that was left out has no gradient; one with a fault was run again, and its own is gone.
    counts_zeros = logging.log_num_zeros_in_grad and not result.is_left_out and result.fault is None
    metrics = meter.take(
        progress.iteration,
        progress.consumed_samples,
        result.learning_rate,
        result.num_samples,
        trainer.optimizer.scaler.scale,
    )
    return replace(
        metrics,
        total_skipped=progress.num_skipped,
        total_nan=progress.num_nan,
        params_norm=trainer.optimizer.params_norm() if logging.log_params_norm else None,
        num_zeros=trainer.optimizer.num_zeros() if counts_zeros else None,
    )


def evaluate_validation(trainer: Trainer, writers: Writers, stop: StopConditions) -> Stop | None:
    """Evaluates on the validation part, each time on the samples after those of the time before."""
    return _evaluate(trainer, writers, "valid", stop)


def _evaluate_at_the_end(trainer: Trainer, writers: Writers, stop: StopConditions) -> Stop | None:
    end = None
    if not _due(trainer.progress.iteration, trainer.config.training.eval_interval):
        end = evaluate_validation(trainer, writers, stop)
    return end or _evaluate(trainer, writers, "test", stop)


def _evaluate(trainer: Trainer, writers: Writers, split: str, stop: StopConditions) -> Stop | None:
    """Evaluates on each of the split's datasets, each told under its name.

    Returns:
        What broke the evaluation off; a dataset's figures are told only when they are whole.
    """
    progress = trainer.progress
    if trainer.config.training.eval_iters == 0:
        return None
    first = trainer.evaluator.first_sample(split, progress.iteration)
    for name, dataset in trainer.datasets.evaluated(split):
        try:
            with trainer.timers("eval-time"):
                loss = trainer.evaluate(dataset, first, stop.raise_if_urgent)
        except Stopped as stopped:
            log.warning("the evaluation at iteration %d is broken off and not told", progress.iteration)
            return stopped.stop
        writers.validation(
            ValidationMetrics(progress.iteration, progress.consumed_samples, split, loss, name)
        )
    return None


def _save(trainer: Trainer, *, is_last: bool) -> None:
    if trainer.config.checkpoint.save:
        trainer.save(is_last=is_last)


def _due(iteration: int, interval: int | None) -> bool:
    """Whether something that happens every `interval` iterations (None or 0: never) happens now."""
    return interval is not None and interval > 0 and iteration % interval == 0
