"""What happens once before a run's first iteration."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager

import torch

from megalite import kernels
from megalite.agreement import code_record
from megalite.checkpoint.lease import FolderLease
from megalite.config import Config, check_config, to_yaml
from megalite.config.comparison import MAY_DIFFER_BETWEEN_RANKS
from megalite.config.flags import flag_of
from megalite.data.build import (
    BuildOptions,
    DatasetSplits,
    build_from_corpora,
    build_mock_datasets,
    num_samples_per_split,
    open_corpora,
)
from megalite.data.corpus_record import CorpusIdentity, DataRecord
from megalite.data.document_ends import DocumentEnds
from megalite.data.fill_in_middle import FillInMiddle, FillInMiddleDataset, find_marks
from megalite.data.index_cache import IndexCache
from megalite.data.indexed import IndexedDataset
from megalite.data.sources import Sources, find_sources
from megalite.data.splits import SPLIT_NAMES
from megalite.data.tokenizer import Tokenizer, configured_tokenizer
from megalite.data.tokenizer_digest import check_tokenizer
from megalite.errors import UserError
from megalite.gpu import describe, settings_for
from megalite.log import configure_logging, log
from megalite.plan.flops import CONVENTION
from megalite.topology import Launch, Topology
from megalite.train.batches import datasets_on_every_stage, reads_data
from megalite.train.chunks import named_parameters
from megalite.train.stopping.requeue import RequeueNote
from megalite.train.stopping.signals import StopSignals, stop_signals
from megalite.train.telemetry.timers import Timers
from megalite.train.telemetry.writers import Writers, startup_line
from megalite.train.trainer import Trainer
from megalite.train.weight_gradients import fusion_of


def prepare_process(config: Config, notices: Sequence[str], launch: Launch) -> None:
    """Sets up logging, tells what the command line's reading found, and checks the config for this world.

    Raises:
        ConfigError: with every mistake, on every rank alike and before any process group starts.
    """
    configure_logging(launch.rank)
    check_config(config, launch.world_size)
    for notice in notices:
        log.warning(notice)
    if config.training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses to be
        torch.use_deterministic_algorithms(True)


def settings_of(config: Config) -> dict[str, str]:
    """Return what must be the same on every rank of a run: the config's fields by flag, and the code."""
    return code_record() | {
        flag_of(field.name): str(getattr(part, field.name))
        for part in (getattr(config, group.name) for group in dataclasses.fields(config))
        for field in dataclasses.fields(part)
        if field.name not in MAY_DIFFER_BETWEEN_RANKS
    }


def listen(config: Config, launch: Launch) -> AbstractContextManager[StopSignals]:
    """Listens to the signals that end the run early; one rank leaves word of an end for a scheduler."""
    note = RequeueNote(config.checkpoint.save if launch.rank == 0 else None)
    return stop_signals(config.training.exit_signals, note)


def resolve_vocabulary(config: Config, topology: Topology) -> Config:
    """Fills in the vocabulary's size from the tokenizer where the config does not give it.

    Raises:
        UserError: the tokenizer cannot be read, or the config's vocabulary has no room for its tokens.
    """
    given, kind = config.model.vocab_size, config.data.resolved_tokenizer_type
    if kind is None:
        return config
    with topology.agreed():
        tokenizer = tokenizer_of(config)
        _check_corpora(config, tokenizer, topology)
        size = tokenizer.vocab_size
        # The null tokenizer adds an end-of-document token to the given size.
        if given is not None and kind != "NullTokenizer":
            if given < size:
                raise UserError(
                    f"the vocabulary size {given} (of --vocab-size or --preset) is smaller than the "
                    f"tokenizer's {size}: give --vocab-size {size}"
                )
            size = given
    topology.check_agreement({"the tokenizer's vocabulary": f"{tokenizer.vocab_size} tokens"}, "tokenizer")
    model = dataclasses.replace(config.model, vocab_size=size)
    resolved = dataclasses.replace(config, model=model)
    check_config(resolved, topology.world_size)
    return resolved


def tokenizer_of(config: Config) -> Tokenizer:
    """The tokenizer that the config names."""
    return configured_tokenizer(config.data, config.model.vocab_size)


def _check_corpora(config: Config, tokenizer: Tokenizer, topology: Topology) -> None:
    """Refuses corpora that were made with another tokenizer; one rank looks for all."""
    if topology.rank != 0 or config.data.mock_data:
        return
    blends = [blend for split in find_sources(config.data).values() for blend in split]
    check_tokenizer((source.prefix for blend in blends for source in blend.sources), tokenizer)


def open_writers(config: Config, topology: Topology, lease: FolderLease | None = None) -> Writers:
    """Opens the run's outputs, before any work is done.

    Args:
        lease: on the folder of checkpoints: once it is lost, nothing more is written.
    """
    with topology.agreed():
        return Writers(config.logging, topology, to_yaml(config), config.checkpoint.save, lease)


def num_samples_asked(config: Config, dp: int) -> tuple[int, int, int]:
    """The samples that a whole run on `dp` replicas draws from train, valid and test."""
    return num_samples_per_split(
        config.num_samples(dp),
        config.num_iterations(dp),
        config.training.eval_interval,
        config.training.eval_iters,
        config.global_batch(dp),
    )


def build_data(
    config: Config, topology: Topology, timers: Timers, splits: Collection[str] = SPLIT_NAMES
) -> DatasetSplits:
    """Opens the corpora and orders their samples for the whole run, of these splits alone."""
    training = config.training
    asked = num_samples_asked(config, topology.dp.size)
    num_train, num_valid, num_test = (
        number if split in splits else 0 for split, number in zip(SPLIT_NAMES, asked, strict=True)
    )
    num_samples = num_train, num_valid, num_test
    seq_length, vocab_size = config.model.seq_length, config.model.vocab_size
    assert vocab_size is not None
    ends = document_ends(config, topology)
    if config.data.mock_data:
        return build_mock_datasets(seq_length, num_samples, training.seed, vocab_size, ends)
    with timers("train/valid/test-data-iterators-setup"):
        sources, opened, record = _open_corpora(config, topology, ends)
        with topology.agreed():
            cache = IndexCache(config.data.data_cache_path)
            batch_size = config.global_batch(topology.dp.size)
            options = BuildOptions(
                seq_length, training.seed, vocab_size, config.data.blend_by, cache, batch_size, ends
            )
            datasets = None
            if record is not None:
                datasets = build_from_corpora(sources, opened, num_samples, options)
                datasets = _fill_in_middle(config, datasets)
    datasets = dataclasses.replace(datasets_on_every_stage(datasets, topology), ends=ends, record=record)
    if training.eval_iters > 0 and "valid" in splits and not datasets.evaluated("valid"):
        log.warning("there is nothing to validate on: --split leaves no sequence to validation")
    return datasets


def _open_corpora(
    config: Config, topology: Topology, ends: DocumentEnds | None
) -> tuple[Sources, dict[str, IndexedDataset], DataRecord | None]:
    """Opens the corpora on ranks that read data, and compares what these ranks see under their names.

    Raises:
        UserError: a file is missing or damaged, or is not the same on all ranks; on every rank.
    """
    opened, record = dict[str, IndexedDataset](), None
    with topology.agreed():
        sources = find_sources(config.data)
        if reads_data(topology, ends):
            opened = open_corpora(sources)
            identities = {prefix: CorpusIdentity.of(corpus) for prefix, corpus in opened.items()}
            record = DataRecord(sources, identities, config.data.blend_by)
    topology.check_agreement(None if record is None else record.for_ranks(), "data")
    return sources, opened, record


def document_ends(config: Config, topology: Topology) -> DocumentEnds | None:
    """What happens at the ends of documents, where something is asked for.

    Raises:
        UserError: the tokenizer has no token that ends a document.
    """
    data = config.data
    if not data.document_options:
        return None
    assert config.model.vocab_size is not None
    if data.resolved_tokenizer_type in (None, "NullTokenizer"):
        eod = config.model.vocab_size - 1  # the null tokenizer's own place for it; mock data's without any
    else:
        with topology.agreed():
            eod = tokenizer_of(config).eod
    is_rotary = config.model.position_embedding_type == "rope"
    return DocumentEnds(
        eod,
        data.reset_position_ids,
        data.reset_attention_mask,
        data.eod_mask_loss,
        on_every_stage=data.reset_attention_mask or (data.reset_position_ids and is_rotary),
    )


def _fill_in_middle(config: Config, datasets: DatasetSplits) -> DatasetSplits:
    """The datasets with fill-in-the-middle in what is trained on, where it is asked for."""
    data = config.data
    if data.fim_rate == 0 or datasets.train is None:
        return datasets
    tokenizer = tokenizer_of(config)
    names = ("fim_prefix_token", "fim_middle_token", "fim_suffix_token")
    marks = find_marks(tokenizer, {flag_of(name): getattr(data, name) for name in names})
    how = FillInMiddle(data.fim_rate, data.fim_spm_rate, *marks, config.training.seed)
    return dataclasses.replace(datasets, train=FillInMiddleDataset(datasets.train, tokenizer, how))


def announce(trainer: Trainer) -> None:
    """Says in a few lines what is about to run, and on what."""
    config, topology = trainer.config, trainer.topology
    log.info(startup_line(topology))
    log.info("kernels on %s: %s", topology.device, kernels.describe(topology.device.type))
    if topology.device.type == "cuda":
        log.info("CUDA: %s", describe(settings_for(config.parallel.tp, config.parallel.zero_stage)))
    log.info("attention: %s", trainer.chunks[0].core.choice)
    log.info("weight gradients: %s", fusion_of(config, topology).told)
    if config.training.fp8_format is not None:
        log.info("linear layers: products in 8 bits (%s), not yet measured", config.training.fp8_format)
    if config.training.compile:
        log.info("layers: compiled at their first calls")
    log.info(
        "vocabulary of %s tokens, padded to %d; %d microbatches of %d samples a rank in a global batch of %d",
        config.model.vocab_size,
        config.model.padded_vocab_size(topology.tp.size),
        trainer.num_microbatches,
        config.training.micro_batch_size,
        trainer.global_batch_size,
    )
    if rampup := config.training.rampup_batch_size:
        log.info("the global batch grows from %d by %d at a time over %d samples", *rampup)
    for name, size in trainer.datasets.sizes():
        log.info("%s samples: %d", name, size)
    if config.logging.log_throughput:
        log.info("TFLOP/s count %s", CONVENTION)
    num_local = sum(parameter.numel() for _, parameter in named_parameters(trainer.chunks))
    log.info("parameters on rank 0: %s", f"{num_local:,}")
