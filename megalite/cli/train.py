"""Train a GPT, BLOOM or Llama-like model, or a BERT, over tensor-, pipeline- and data-parallel ranks.

torchrun --nproc-per-node 4 -m megalite train --preset gpt2-124m --tp 2 --pp 2 --data-path PREFIX …
torchrun --nproc-per-node 4 -m megalite train-bert --preset bert-base --tp 2 --pp 2 --data-path PREFIX …

This module does not import torch, which takes seconds, so that mistakes in flags are reported before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from megalite.config import Config
from megalite.config.model.transformer import Architecture
from megalite.config.validate import problems_of
from megalite.frontends.command_line import NEEDED_TO_TRAIN, ParsedRun, parse_run
from megalite.utils.commands import is_first_rank, run_rank
from megalite.utils.errors import ConfigError, UserError

if TYPE_CHECKING:
    from megalite.data.samples import Samples
    from megalite.model.stage import StageProvider
    from megalite.train.loop import Callback
    from megalite.train.run_context import DatasetProvider


def main(arguments: Sequence[str]) -> None:
    """Run one rank of the training that the arguments describe."""
    pretrain(arguments=arguments)


def train_bert(arguments: Sequence[str]) -> None:
    """Run one rank of the training of a BERT."""
    pretrain(architecture="bert", arguments=arguments)


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
    run = partial(_pretrain, architecture, provided, callbacks)
    if arguments is None:
        run_rank(run, sys.argv[1:])
    run(arguments)


def _pretrain(
    architecture: Architecture,
    provided: tuple[StageProvider | None, DatasetProvider | None, Samples | None],
    callbacks: Sequence[Callback],
    arguments: Sequence[str],
) -> None:
    has_datasets = provided[1] is not None
    try:
        parsed = _parse(architecture, has_datasets, arguments)
        _check(parsed.config, is_first_try=not arguments and not has_datasets)
    except UserError:
        if is_first_rank():
            raise  # and prints it; no other rank waits for it
        from megalite.distributed.rendezvous import refusal_reported

        with refusal_reported():  # to the other ranks
            raise
    if "torch" not in sys.modules and is_first_rank():
        # The import takes seconds, or longer from a busy disk, and nothing else is printed meanwhile.
        sys.stderr.write("importing PyTorch\n")
    from megalite.train.rank_training import train_parsed_run

    train_parsed_run(parsed, provided, callbacks)


def _parse(architecture: Architecture, has_datasets: bool, arguments: Sequence[str]) -> ParsedRun:
    """Return the config of the command line.

    If the program has its own datasets, the config need not name a corpus. If it names one, the provider may
    read it.
    """
    if not has_datasets:
        return parse_run(arguments, architecture=architecture)
    unneeded = [name for name in NEEDED_TO_TRAIN if name != "train_iters"]
    parsed = parse_run(arguments, unneeded, architecture)
    data = replace(parsed.config.data, mock_data=True)
    return parsed._replace(config=replace(parsed.config, data=data))


def _check(config: Config, is_first_try: bool) -> None:
    """Check the config of a run in the layout of its flags.

    Args:
        is_first_try: no flag is passed: add a line that says what to pass.

    Raises:
        ConfigError: lists all mistakes.
    """
    world_size, mode = os.environ.get("WORLD_SIZE", "1"), config.dry_run
    if mode.dry_run or mode.verify_layouts is not None:
        return  # the layout and the number of ranks are others
    if config.parallel.layout == "auto" or config.checkpoint.join_run or not world_size.isdecimal():
        return
    num_local = os.environ.get("LOCAL_WORLD_SIZE", world_size)
    num_spares = config.checkpoint.spare_nodes * (int(num_local) if num_local.isdecimal() else 0)
    problems = problems_of(config, max(1, int(world_size) - num_spares))
    if problems and is_first_try:
        problems.append(
            f"no flag is passed: try --preset {config.model.architecture}-tiny --mock-data --vocab-size 256 "
            "--train-iters 10, which trains on random tokens; --help lists the flags"
        )
    if problems:
        raise ConfigError(problems)
