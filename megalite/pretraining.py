"""Pretrain a model from a command line, on one rank of a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from megalite.checkpoint.lease import hold_folder
from megalite.config import Config
from megalite.config.command_line import NEEDED_TO_TRAIN, parse
from megalite.config.entry_point import run_rank
from megalite.config.model import Architecture
from megalite.data.samples import Samples
from megalite.distributed.topology import Launch, Topology, refusal_reported
from megalite.dry_run.dry_run import dry_run
from megalite.errors import UserError
from megalite.log import configure_logging, log
from megalite.model.stage import StageProvider
from megalite.train.callbacks import default_callbacks
from megalite.train.loop import Callback, check_callbacks, train
from megalite.train.out_of_memory import check_host_memory, explain_out_of_memory
from megalite.train.resume import resume
from megalite.train.run_context import DatasetProvider, Providers, resolve_run
from megalite.train.run_datasets import build_data
from megalite.train.setup import announce, listen, open_writers, prepare_process, settings_of
from megalite.train.stopping import StopConditions, StopSignals, exit_if_switched_off
from megalite.train.trainer import Trainer
from megalite.train.verification import warn_if_unverified
from megalite.verify.compare_runs import verify_layouts
from megalite.verify.layouts import layouts_named


def pretrain(
    model_provider: StageProvider | None = None,
    dataset_provider: DatasetProvider | None = None,
    *,
    samples: Samples | None = None,
    callbacks: Sequence[Callback] = (),
    architecture: Architecture = "gpt",
    arguments: Sequence[str] | None = None,
) -> None:
    """Run one rank of a program from its command line to the end of training, and exit.

    The program takes all flags of ``megalite train``. Start it with torchrun, or with python for one rank.

    Args:
        model_provider: builds the pipeline stages of your own model: a subclass of `GPT` or of
            `SequentialStage`, or a function with the same arguments. By default the architecture's model.
        dataset_provider: takes the `RunContext` and returns your own `DatasetSplits`. By default the datasets
            of --data-path or --mock-data.
        samples: how microbatches are read from your datasets, such as `FieldSamples`; by default each sample
            is int64 ``[s + 1]`` tokens.
        callbacks: your own callbacks, called before the run's.
        architecture: architecture of the model that the flags describe.
        arguments: the command line; by default the process's own, and then errors end the process.

    Raises:
        SystemExit: with the exit status.
        UserError: if `arguments` are passed, and they, the providers, a file or the cluster have an error.
    """
    provided = model_provider, dataset_provider, samples
    main = partial(_pretrain, architecture, provided, callbacks)
    if arguments is None:
        run_rank(main, sys.argv[1:])
    main(arguments)


def _pretrain(
    architecture: Architecture,
    provided: tuple[StageProvider | None, DatasetProvider | None, Samples | None],
    callbacks: Sequence[Callback],
    arguments: Sequence[str],
) -> None:
    with refusal_reported():
        providers = Providers(*provided)
        check_callbacks(callbacks)
        config, notices = _parse(architecture, providers, arguments)
        if config.dry_run.dry_run:
            _refuse_several_ranks("--dry-run", "; pass --world-size and --rank")
            return dry_run(config, notices, providers.model)
        if config.dry_run.verify_layouts is not None:
            _refuse_several_ranks("--verify-layouts")
            configure_logging(rank=0)
            for notice in notices:
                log.warning(notice)
            is_same = verify_layouts(
                config, layouts_named(config.dry_run.verify_layouts), providers=providers
            )
            raise SystemExit(0 if is_same else 1)
        launch = Launch.from_environment()
        prepare_process(config, notices, launch)

    with listen(config, launch) as signals:
        # Exit inside the block, so that later signals do not change the exit status.
        raise SystemExit(train_rank(config, launch, signals, callbacks, providers))


def _parse(
    architecture: Architecture, providers: Providers, arguments: Sequence[str]
) -> tuple[Config, list[str]]:
    """Return the config of the command line.

    If the program has its own datasets, the config need not name a corpus. If it names one, the provider may
    read it.
    """
    if providers.datasets is None:
        return parse(arguments, architecture=architecture)
    unneeded = [name for name in NEEDED_TO_TRAIN if name != "train_iters"]
    config, notices = parse(arguments, unneeded, architecture)
    return replace(config, data=replace(config.data, mock_data=True)), notices


def _refuse_several_ranks(flag: str, more: str = "") -> None:
    if (started := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise UserError(
            f"{flag} is one process, but the launcher has started {started} (WORLD_SIZE): start it with "
            f"python{more}"
        )


def train_rank(
    config: Config,
    launch: Launch,
    signals: StopSignals,
    callbacks: Sequence[Callback],
    providers: Providers,
) -> int:
    """Join the other ranks, train, and return the exit status."""
    with Topology.start(config.parallel, launch, must_agree=settings_of(config)) as topology:
        exit_if_switched_off(config.training, topology)
        with hold_folder(config.checkpoint.save, topology) as lease:
            run = resolve_run(config, topology, lease=lease, providers=providers)
            check_host_memory(run.config, topology, launch.local_world_size)
            datasets = build_data(run)
            with (
                open_writers(run) as writers,
                explain_out_of_memory(run.config, topology),
                Trainer(run, datasets) as trainer,
            ):
                announce(trainer)
                warn_if_unverified(run)
                resume(trainer, launch)
                stop_conditions = StopConditions(config.training, topology, signals, lease)
                return train(trainer, stop_conditions, [*callbacks, *default_callbacks(writers)])
