"""The training loop: iterate, log, evaluate, save, stop."""

from __future__ import annotations

from megalite.config import Config
from megalite.log import log
from megalite.train.metrics import IntervalMeter, ValidationMetrics
from megalite.train.profiler import profiler
from megalite.train.stop import StopConditions
from megalite.train.trainer import Trainer
from megalite.train.writers import Writers


def train(trainer: Trainer, writers: Writers) -> None:
    """Runs the trainer from where it stands to the end of its run or to a stop condition."""
    config, topology = trainer.config, trainer.topology
    num_iterations = _train_iters(config)
    stop = StopConditions(config.training, topology)
    meter = IntervalMeter(
        config.model, num_iterations, topology.world_size, topology.device, topology.tp.size
    )
    with profiler(config.logging, topology) as profile:
        while trainer.progress.iteration < num_iterations:
            result = trainer.step()
            profile.step()
            iteration = trainer.progress.iteration
            reason = stop.reason(iteration)
            ends = reason is not None or iteration == num_iterations
            meter.add(result.loss, result.grad_norm, result.skipped)
            if ends or _due(iteration, config.logging.log_interval):
                consumed = trainer.progress.consumed_samples
                metrics = meter.take(iteration, consumed, result.learning_rate, trainer.global_batch_size)
                writers.iteration(metrics, trainer.timers)
            with meter.paused():
                if _due(iteration, config.training.eval_interval):
                    evaluate_validation(trainer, writers)
                if ends or _due(iteration, config.checkpoint.save_interval):
                    _save(trainer)
            if reason:
                log.info("exiting after iteration %d: %s", iteration, reason)
                return
    _evaluate_at_the_end(trainer, writers)


def evaluate_validation(trainer: Trainer, writers: Writers) -> None:
    """Evaluates on the validation part, each time on the samples after those of the time before."""
    num_before = (trainer.progress.iteration - 1) // trainer.config.training.eval_interval
    _evaluate(trainer, writers, "valid", num_before)


def _evaluate_at_the_end(trainer: Trainer, writers: Writers) -> None:
    if not _due(trainer.progress.iteration, trainer.config.training.eval_interval):
        evaluate_validation(trainer, writers)
    _evaluate(trainer, writers, "test", 0)


def _evaluate(trainer: Trainer, writers: Writers, split: str, num_before: int) -> None:
    """Evaluates on each of the split's datasets, each told under its name."""
    num_batches, progress = trainer.config.training.eval_iters, trainer.progress
    if num_batches == 0:
        return
    for name, dataset in trainer.datasets.evaluated(split):
        with trainer.timers("eval-time"):
            loss = trainer.evaluate(dataset, num_before * num_batches * trainer.global_batch_size)
        writers.validation(
            ValidationMetrics(progress.iteration, progress.consumed_samples, split, loss, name)
        )


def _save(trainer: Trainer) -> None:
    if trainer.config.checkpoint.save:
        log.info("saved checkpoint %s", trainer.save())


def _due(iteration: int, interval: int | None) -> bool:
    """Whether something that happens every `interval` iterations (None or 0: never) happens now."""
    return interval is not None and interval > 0 and iteration % interval == 0


def _train_iters(config: Config) -> int:
    assert config.training.train_iters is not None
    return config.training.train_iters
