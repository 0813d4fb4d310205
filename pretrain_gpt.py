#!/usr/bin/env python
"""Trains a GPT, BLOOM or Llama-like model over tensor-, pipeline- and data-parallel ranks.

torchrun --nproc-per-node 4 pretrain_gpt.py --preset gpt2-124m --tp 2 --pp 2 --data-path PREFIX …
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megalite.cli import parse, run_main
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

    start = Topology.start(config.parallel, launch, must_agree=settings_of(config))
    with listen(config, launch) as signals, start as topology:
        leave_if_switched_off(config.training, topology)
        config = resolve_vocabulary(config, topology)
        timers = Timers(topology.device, config.logging.timers_level)
        datasets = build_data(config, topology, timers)
        with (
            open_writers(config, topology) as writers,
            memory_explained(config, topology),
            Trainer(config, topology, datasets, timers) as trainer,
        ):
            announce(trainer)
            resume(trainer, launch)
            with watched(trainer):
                status = train(trainer, writers, StopConditions(config.training, topology, signals))
    raise SystemExit(status)


if __name__ == "__main__":
    run_main(main, sys.argv[1:])
