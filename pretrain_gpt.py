#!/usr/bin/env python
"""Trains a GPT, BLOOM or Llama-like model over tensor-, pipeline- and data-parallel ranks.

torchrun --nproc-per-node 4 pretrain_gpt.py --preset gpt2-124m --tp 2 --pp 2 --data-path PREFIX …
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megalite.checkpoint.lease import hold_folder
from megalite.cli import parse, run_main
from megalite.config import Config
from megalite.dryrun.dry_run import dry_run
from megalite.topology import Launch, Topology, refusal_reported
from megalite.train.health.watchdog import watched
from megalite.train.loop import train
from megalite.train.out_of_memory import memory_explained
from megalite.train.prepare import (
    announce,
    build_data,
    listen,
    open_writers,
    prepare_process,
    resolve_vocabulary,
    settings_of,
)
from megalite.train.resume import resume
from megalite.train.stopping.signals import StopSignals
from megalite.train.stopping.stop import StopConditions, leave_if_switched_off
from megalite.train.telemetry.timers import Timers
from megalite.train.trainer import Trainer


def main(arguments: Sequence[str]) -> None:
    """Runs one rank from its command line to the end of training."""
    with refusal_reported():
        config, notices = parse(arguments)
        if config.dry_run.dry_run:
            return dry_run(config, notices)
        launch = Launch.from_environment()
        prepare_process(config, notices, launch)

    with listen(config, launch) as signals:
        # In the block: signals that still come do not change the status.
        raise SystemExit(run(config, launch, signals))


def run(config: Config, launch: Launch, signals: StopSignals) -> int:
    """Join the other ranks, train, and return the exit status."""
    with Topology.start(config.parallel, launch, must_agree=settings_of(config)) as topology:
        leave_if_switched_off(config.training, topology)
        with hold_folder(config.checkpoint.save, topology) as lease:
            config = resolve_vocabulary(config, topology)
            timers = Timers(topology.device, config.logging.timers_level)
            datasets = build_data(config, topology, timers)
            with (
                open_writers(config, topology, lease) as writers,
                memory_explained(config, topology),
                Trainer(config, topology, datasets, timers, lease) as trainer,
            ):
                announce(trainer)
                resume(trainer, launch)
                stop = StopConditions(config.training, topology, signals, lease)
                with watched(trainer):
                    return train(trainer, writers, stop)


if __name__ == "__main__":
    run_main(main, sys.argv[1:])
