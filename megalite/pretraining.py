"""Pretrain a model from a command line, on one rank of a run."""

from __future__ import annotations

from collections.abc import Sequence

from megalite.checkpoint.lease import hold_folder
from megalite.config import Config
from megalite.config.command_line import parse
from megalite.config.model import Architecture
from megalite.distributed.topology import Launch, Topology, refusal_reported
from megalite.dry_run.dry_run import dry_run
from megalite.train.callbacks import default_callbacks
from megalite.train.loop import Callback, train
from megalite.train.out_of_memory import explain_out_of_memory
from megalite.train.resume import resume
from megalite.train.run_context import resolve_run
from megalite.train.run_datasets import build_data
from megalite.train.setup import announce, listen, open_writers, prepare_process, settings_of
from megalite.train.stopping import StopConditions, StopSignals, exit_if_switched_off
from megalite.train.trainer import Trainer


def pretrain(
    architecture: Architecture, arguments: Sequence[str], callbacks: Sequence[Callback] = ()
) -> None:
    """Run one rank from its command line to the end of training.

    Args:
        architecture: of the model, which the command line describes.
        callbacks: your own, called before the run's.

    Raises:
        SystemExit: with the exit status.
        UserError: the command line, a file or the cluster is at fault.
    """
    with refusal_reported():
        config, notices = parse(arguments, architecture=architecture)
        if config.dry_run.dry_run:
            return dry_run(config, notices)
        launch = Launch.from_environment()
        prepare_process(config, notices, launch)

    with listen(config, launch) as signals:
        # Inside the block, so that later signals do not change the exit status.
        raise SystemExit(train_rank(config, launch, signals, callbacks))


def train_rank(config: Config, launch: Launch, signals: StopSignals, callbacks: Sequence[Callback]) -> int:
    """Join the other ranks, train, and return the exit status."""
    with Topology.start(config.parallel, launch, must_agree=settings_of(config)) as topology:
        exit_if_switched_off(config.training, topology)
        with hold_folder(config.checkpoint.save, topology) as lease:
            run = resolve_run(config, topology, lease=lease)
            datasets = build_data(run)
            with (
                open_writers(run) as writers,
                explain_out_of_memory(run.config, topology),
                Trainer(run, datasets) as trainer,
            ):
                announce(trainer)
                resume(trainer, launch)
                stop_conditions = StopConditions(config.training, topology, signals, lease)
                return train(trainer, stop_conditions, [*callbacks, *default_callbacks(writers)])
