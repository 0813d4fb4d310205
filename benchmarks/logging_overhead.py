#!/usr/bin/env python
"""Measure the cost of timers, TensorBoard and the pipeline trace in an iteration.

python benchmarks/logging_overhead.py [--iterations 4]

Two pipeline stages with 8 microbatches on two ranks of this machine. What observes an iteration is billed for
the processor time of its own calls, and put in relation to the processor time of the same iterations: the
difference of two runs would be lost in the noise of a machine that has neighbours. To read that clock at both
ends of each call is on the bill too. Writing is billed by itself, TensorBoard's thread included, as if
it were done after every iteration.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from megalite.config import Config, DataConfig, LoggingConfig, ModelConfig, ParallelConfig, TrainingConfig
from megalite.distributed.axis import Observer, observing
from megalite.distributed.local_ranks import run_ranks
from megalite.distributed.topology import Topology
from megalite.train.telemetry.metrics import IntervalMeter
from megalite.train.telemetry.timers import LEVELS, Timers, WallClock
from megalite.train.telemetry.writers import Writers
from megalite.train.tracing import Recorder
from megalite.train.trainer import Trainer, start_trainer
from megalite.utils.log import log

WRITES = 100


class Bill:
    """Processor time that the calls of an observer take in the block."""

    def __init__(self, observer: Observer) -> None:
        self.seconds = 0.0
        self._observer: Any = observer

    def __enter__(self) -> Bill:
        for name in ("begins", "ends"):
            setattr(self._observer, name, partial(self._billed, getattr(self._observer, name)))
        return self

    def __exit__(self, *_: object) -> None:
        del self._observer.begins, self._observer.ends

    def _billed(self, method: Callable[[object], None], what: object) -> None:
        start = time.thread_time()
        method(what)
        self.seconds += time.thread_time() - start


def share_of(trainer: Trainer, level: int, iterations: int) -> float:
    """Return the share of an iteration's processor time that timers of this level (3: the trace) take."""
    observer: Observer = trainer.timers
    trainer.timers.level = level
    if level == 3:
        observer, trainer.timers.level = Recorder(WallClock(), WallClock()), 0
    with observing(trainer.topology.observers, *([observer] if level else [])), Bill(observer) as bill:
        trainer.step()
        bill.seconds, start = 0.0, time.thread_time()
        for _ in range(iterations):
            trainer.step()
        used = time.thread_time() - start
    return bill.seconds / (used - bill.seconds)


def writing(trainer: Trainer, config: Config, level: int, iterations: int) -> float:
    """Return the same for the log line and TensorBoard, on the writing rank, if it writes each iteration."""
    topology, timers = trainer.topology, trainer.timers
    start = time.thread_time()
    for _ in range(iterations):
        result = trainer.step()
    iteration_seconds = (time.thread_time() - start) / iterations
    meter = IntervalMeter(config.model, 10**6, topology.world_size, topology.device, 1)
    timers.level = level
    with Writers(config.logging, topology, "") as writers:
        start = time.process_time()
        for number in range(1, WRITES + 1):
            for name in LEVELS:
                with timers(name):
                    pass
            meter.add(result)
            metrics = meter.take(number)
            writers.iteration(1, metrics, timers)
    return (time.process_time() - start) / WRITES / iteration_seconds


def measure(topology: Topology, config: Config, iterations: int) -> dict[str, float]:
    """Return the shares of an iteration by what is done, of this rank."""
    log.setLevel(logging.ERROR)
    timers = Timers(topology.device, observers=topology.observers)
    trainer = start_trainer(config, topology, timers)
    shares = {f"timers of level {level}": share_of(trainer, level, iterations) for level in range(3)}
    shares["--trace-pipeline, while it records"] = share_of(trainer, 3, iterations)
    for level in range(3):
        name = f"log line and TensorBoard every iteration, level {level}"
        shares[name] = writing(trainer, config, level, iterations)
    return shares


def config_of(hidden: int, folder: str) -> Config:
    """Return a small model, and all that can be written."""
    return Config(
        model=ModelConfig(
            num_layers=4, hidden_size=hidden, num_attention_heads=4, seq_length=256, vocab_size=8192
        ),
        parallel=ParallelConfig(pipeline_model_parallel_size=2),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(global_batch_size=8, train_iters=10**6, eval_iters=0),
        logging=LoggingConfig(
            log_interval=1,
            tensorboard_dir=folder,
            log_timers_to_tensorboard=True,
            log_throughput=True,
            log_memory_to_tensorboard=True,
            log_batch_size_to_tensorboard=True,
        ),
    )


def main() -> None:
    """Print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(flags.hidden, folder)
        ranks = run_ranks(measure, config.parallel.mesh, 2, config, flags.iterations, timeout=3600)
    print(f"torch {torch.__version__}, {vars(flags)}; shares of an iteration's processor time")
    print(f"{'':<52} {'rank 0':>8} {'rank 1, the writing one':>24}")
    for name in ranks[0]:
        print(f"{name:<52} {ranks[0][name]:>8.3%} {ranks[1][name]:>24.3%}")


if __name__ == "__main__":
    main()
