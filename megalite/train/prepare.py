"""What happens once before a run's first iteration."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from megalite import kernels
from megalite.config import Config, to_yaml
from megalite.data.build import DatasetSplits, build_datasets, build_mock_datasets, num_samples_per_split
from megalite.data.tokenizer import build_tokenizer
from megalite.errors import UserError
from megalite.folders import make_writable
from megalite.log import configure_logging, log
from megalite.topology import Launch, Topology
from megalite.train.timers import Timers
from megalite.train.trainer import Trainer
from megalite.train.writers import Writers, startup_line


def prepare_process(config: Config, notices: Sequence[str], launch: Launch) -> None:
    """Sets up logging, tells what the command line's reading found, and checks the config for this world.

    Raises:
        ConfigError: with every mistake, on every rank alike and before any process group starts.
    """
    configure_logging(launch.rank)
    config.validate(launch.world_size)
    for notice in notices:
        log.warning(notice)
    if config.training.deterministic:
        torch.use_deterministic_algorithms(True)


def resolve_vocabulary(config: Config, topology: Topology) -> Config:
    """Fills in the vocabulary's size from the tokenizer where the config does not give it.

    Raises:
        UserError: the tokenizer cannot be read, or the config's vocabulary has no room for its tokens.
    """
    data, given = config.data, config.model.vocab_size
    kind = data.resolved_tokenizer_type
    if kind is None:
        return config
    with topology.agreed():
        tokenizer = build_tokenizer(
            kind,
            tokenizer_model=data.tokenizer_model,
            vocab_file=data.vocab_file,
            merge_file=data.merge_file,
            name_or_path=data.tokenizer_name_or_path,
            vocab_size=given,
        )
        size = tokenizer.vocab_size
        if (
            given is not None and kind != "NullTokenizer"
        ):  # which adds an end-of-document token to the given size
            if given < size:
                raise UserError(f"--vocab-size {given} is smaller than the tokenizer's {size}: leave it out")
            size = given
    model = dataclasses.replace(config.model, vocab_size=size)
    resolved = dataclasses.replace(config, model=model)
    resolved.validate(topology.world_size)
    return resolved


def open_writers(config: Config, topology: Topology) -> Writers:
    """Opens the run's outputs and tries its checkpoint folder, before any work is done."""
    with topology.agreed():
        if config.checkpoint.save and topology.rank == 0:
            make_writable(Path(config.checkpoint.save), "--save")
        return Writers(config.logging, topology, to_yaml(config))


def build_data(config: Config, topology: Topology, timers: Timers) -> DatasetSplits:
    """Opens the corpora and orders their samples for the whole run."""
    training = config.training
    assert training.train_iters is not None
    num_samples = num_samples_per_split(
        0,
        training.train_iters,
        training.eval_interval,
        training.eval_iters,
        config.global_batch(topology.dp.size),
    )
    seq_length, vocab_size = config.model.seq_length, config.model.vocab_size
    assert vocab_size is not None
    if config.data.mock_data:
        return build_mock_datasets(seq_length, num_samples, training.seed, vocab_size)
    with timers("train/valid/test-data-iterators-setup"), topology.agreed():
        return build_datasets(
            config.data.data_path, config.data.split, seq_length, num_samples, training.seed, vocab_size
        )


def announce(trainer: Trainer) -> None:
    """Says in a few lines what is about to run, and on what."""
    config, topology = trainer.config, trainer.topology
    log.info(startup_line(topology))
    log.info("kernels on %s: %s", topology.device, kernels.describe(topology.device.type))
    log.info(
        "vocabulary of %s tokens, padded to %d; %d microbatches of %d samples a rank in a global batch of %d",
        config.model.vocab_size,
        config.model.padded_vocab_size(topology.tp.size),
        trainer.num_microbatches,
        config.training.micro_batch_size,
        trainer.global_batch_size,
    )
    for split in dataclasses.fields(trainer.datasets):
        dataset = getattr(trainer.datasets, split.name)
        if dataset is not None:
            log.info("%s samples: %d", split.name, len(dataset))
    num_local = sum(parameter.numel() for parameter in trainer.stage.parameters())
    log.info("parameters on rank 0: %s", f"{num_local:,}")


def resume(trainer: Trainer) -> None:
    """Loads the latest checkpoint of --load, where there is one."""
    folder = trainer.config.checkpoint.load
    if not folder:
        return
    if trainer.load():
        log.info("resumed from %s at iteration %d", folder, trainer.progress.iteration)
    else:
        log.warning("no checkpoint in --load %s yet: training starts from new weights", folder)
