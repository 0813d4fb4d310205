#!/usr/bin/env python
"""How long Python's garbage collection pauses training, with and without --manual-gc.

python benchmarks/garbage_collection.py

The same run of a small GPT takes turns in one process: with Python's own collections, and with the run's
(megalite/train/loop.py). A pause within a step makes all other ranks wait; a pause
between steps is the same on all ranks. The first iteration of each turn is not counted.
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from megalite.config import Config, DataConfig, ParallelConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.distributed.rendezvous import Launch
from megalite.distributed.topology import Topology
from megalite.train.callbacks import default_callbacks
from megalite.train.loop import Callback, TrainingLoop, train
from megalite.train.stopping import RequeueNote, StopConditions, StopSignals
from megalite.train.telemetry.writers import Writers
from megalite.train.train_step import StepResult
from megalite.train.trainer import start_trainer
from megalite.utils.commands import run_main
from megalite.utils.log import log


class Pauses(Callback):
    """Measures each collection.

    Attributes:
        within, between: milliseconds of the collections within steps and between them.
    """

    def __init__(self) -> None:
        self.within: list[float] = []
        self.between: list[float] = []
        self._is_in_step = False
        self._start = 0.0

    @contextmanager
    def running(self, loop: TrainingLoop) -> Iterator[None]:
        self._loop = loop
        gc.callbacks.append(self._measure)
        try:
            yield
        finally:
            gc.callbacks.remove(self._measure)

    def before_step(self, loop: TrainingLoop) -> None:
        self._is_in_step = True

    def after_step(self, loop: TrainingLoop, result: StepResult) -> None:
        self._is_in_step = False

    def _measure(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._start = time.perf_counter()
        elif self._loop.iteration > 1:
            pauses = self.within if self._is_in_step else self.between
            pauses.append(1e3 * (time.perf_counter() - self._start))


def measured(topology: Topology, num_iterations: int, manual_gc: bool) -> Pauses:
    """Train, and return the pauses."""
    config = Config(
        model=replace(PRESETS["gpt-tiny"], vocab_size=128, seq_length=32),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(
            micro_batch_size=1,
            global_batch_size=4,
            train_iters=num_iterations,
            eval_iters=0,
            manual_gc=manual_gc,
        ),
    )
    pauses = Pauses()
    stop_conditions = StopConditions(config.training, topology, StopSignals(RequeueNote(None)))
    with Writers(config.logging, topology, "") as writers, start_trainer(config, topology) as trainer:
        train(trainer, stop_conditions, [pauses, *default_callbacks(writers, config)])
    return pauses


def main(arguments: Sequence[str]) -> None:
    """Print the pauses of each kind of collection, the medians of the turns."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=201)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args(arguments)
    log.setLevel(logging.ERROR)
    found: dict[bool, list[Pauses]] = {False: [], True: []}
    parallel = ParallelConfig(distributed_backend="gloo", num_threads=1)
    with Topology.start(parallel.mesh, Launch(0, 1, 0, 1)) as topology:
        for _ in range(args.turns):
            for manual_gc, turns in found.items():
                turns.append(measured(topology, args.iterations, manual_gc))
    heads = f"{'number':>12}{'total ms':>12}{'longest ms':>12}"
    print(f"{f'{args.iterations - 1} iterations':16}{'within steps':>36}{'between steps':>36}")
    print(f"{'':16}{heads}{heads}")
    for manual_gc, turns in found.items():
        cells = []
        for name in ("within", "between"):
            pauses = [getattr(turn, name) for turn in turns]
            cells += [
                f"{statistics.median(map(len, pauses)):.0f}",
                f"{statistics.median(map(sum, pauses)):.1f}",
                f"{statistics.median(max(each, default=0.0) for each in pauses):.1f}",
            ]
        name = "--manual-gc" if manual_gc else "--no-manual-gc"
        print(f"{name:16}" + "".join(f"{cell:>12}" for cell in cells))
    gc.unfreeze()
    all_objects = _milliseconds_of_a_collection()
    gc.freeze()
    frozen = _milliseconds_of_a_collection()
    print(f"a full collection: {all_objects:.1f} ms, {frozen:.1f} ms with all objects frozen")


def _milliseconds_of_a_collection() -> float:
    gc.collect()
    start = time.perf_counter()
    gc.collect()
    return 1e3 * (time.perf_counter() - start)


if __name__ == "__main__":
    run_main(main, sys.argv[1:])
