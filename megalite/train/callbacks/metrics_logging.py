"""Log the metrics of each interval: log line, metrics file, TensorBoard, Weights & Biases."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from megalite.train.loop import Callback, TrainingLoop, is_due
from megalite.train.telemetry.metrics import (
    CompileTime,
    IntervalMeter,
    IterationMetrics,
    ValidationMetrics,
    compile_time,
)
from megalite.train.telemetry.time_recorder import TimeRecorder
from megalite.train.telemetry.time_terms import TimeSample
from megalite.train.telemetry.writers import Writers
from megalite.train.train_step import StepResult
from megalite.train.trainer import Trainer


class MetricsLogging(Callback):
    """Metrics of intervals of iterations, passed to the writers.

    The time between two iterations (evaluations, checkpoints, other callbacks) and the compilation time of
    torch.compile do not count.
    """

    def __init__(self, writers: Writers) -> None:
        self.writers = writers
        self.meters: dict[int, IntervalMeter] = {}  # by interval
        self.compiling: CompileTime
        self.times: TimeRecorder | None = None  # with --log-time-breakdown

    @contextmanager
    def running(self, loop: TrainingLoop) -> Iterator[None]:
        trainer, topology = loop.trainer, loop.trainer.topology
        self.writers.start(loop.iteration, trainer.progress.consumed_samples)
        self.meters = {
            interval: IntervalMeter(
                trainer.config.model,
                loop.num_iterations,
                topology.world_size,
                topology.device,
                topology.tp.size,
            )
            for interval in self.writers.intervals
        }
        with ExitStack() as stack:
            if trainer.config.logging.log_time_breakdown:
                self.times = TimeRecorder(trainer)
                stack.enter_context(self.times.running())
            self.compiling = stack.enter_context(compile_time(trainer.config.training))
            yield

    def before_step(self, loop: TrainingLoop) -> None:
        self.compiling.take()  # compilation in an evaluation, while the meters are paused
        if self.times is not None:
            interval = loop.trainer.config.logging.log_interval
            measured = loop.next_iteration + 1 if interval > 1 else loop.next_iteration
            self.times.begin(
                is_sampled=is_due(loop.next_iteration, interval), measures_kernels=is_due(measured, interval)
            )
        for meter in self.meters.values():
            meter.resume()

    def after_step(self, loop: TrainingLoop, result: StepResult) -> None:
        seconds, sample = self.compiling.take(), None
        if self.times is not None:
            seconds += self.times.end_iteration()
            sample = self.times.sample(result.plan.num_microbatches)
        begin = time.perf_counter()
        for interval, meter in self.meters.items():
            meter.add(result)
            meter.subtract(seconds)
            if loop.is_ending or is_due(loop.iteration, interval):
                metrics = _metrics(loop.trainer, meter, result, sample)
                self.writers.iteration(interval, metrics, loop.trainer.timers)
        for meter in self.meters.values():
            meter.pause()
        if self.times is not None:
            self.times.end(time.perf_counter() - begin)

    def on_evaluation(self, loop: TrainingLoop, metrics: ValidationMetrics) -> None:
        self.writers.validation(metrics)


def _metrics(
    trainer: Trainer, meter: IntervalMeter, result: StepResult, sample: TimeSample | None
) -> IterationMetrics:
    """Return the interval's metrics, with the run's totals and the optional metrics."""
    progress, logging = trainer.progress, trainer.config.logging
    # An excluded iteration has no gradient; the NaN locator has overwritten an anomaly's gradient.
    has_gradient = not result.plan.is_excluded and result.anomaly is None
    return replace(
        meter.take(progress.consumed_samples, trainer.optimizer.scaler.scale),
        total_skipped=progress.num_skipped,
        total_nan=progress.num_nan,
        time_breakdown=sample,
        params_norm=trainer.optimizer.params_norm() if logging.log_params_norm else None,
        num_zeros=trainer.optimizer.num_zeros() if logging.log_num_zeros_in_grad and has_gradient else None,
    )
