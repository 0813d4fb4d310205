"""Build what all parts of a run share: its config with a vocabulary, its tokenizer, samples and datasets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from megalite.checkpoint.lease import FolderLease
from megalite.config import Config, check_config
from megalite.config.option import flag_of
from megalite.data.batch_loader import reads_data
from megalite.data.bert_dataset import BertSamples
from megalite.data.build_datasets import (
    BuildOptions,
    DatasetSplits,
    build_from_corpora,
    build_mock_datasets,
    num_samples_per_split,
    open_corpora,
)
from megalite.data.corpus_record import CorpusIdentity, DataRecord
from megalite.data.corpus_sources import SPLIT_NAMES, Sources, find_sources
from megalite.data.fill_in_middle import FillInMiddle, FillInMiddleDataset, find_marks
from megalite.data.gpt_dataset import Dataset, GatherDataset
from megalite.data.index_cache import IndexCache
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.loss_mask import LossMask, has_loss_mask
from megalite.data.mixture import MixtureDataset
from megalite.data.packed_dataset import PackedSamples, PackingOptions
from megalite.data.samples import CheckedDataset, DocumentEnds, FieldSamples, GPTSamples, Samples
from megalite.data.sharded_dataset import is_in_store
from megalite.data.storage import CACHE_BYTES
from megalite.data.tokenizers.tokenizer import Tokenizer, check_tokenizer, configured_tokenizer
from megalite.distributed.topology import Topology
from megalite.model.stage import StageProvider, check_model_provider
from megalite.train.telemetry.timers import Timers
from megalite.utils.errors import UserError, check_call, kind_of
from megalite.utils.log import log

REMOTE_SHUFFLE_BLOCK = 64
"""Default of --shuffle-block for a corpus in object storage."""

DatasetProvider = Callable[["RunContext"], DatasetSplits]
"""Builds the datasets of a run, on every rank."""


@dataclass(frozen=True)
class Providers:
    """Parts of a run that the program provides itself; None for parts from the config.

    Attributes:
        model: builds the stages of your own model.
        datasets: builds your own datasets; then the config must not name a corpus.
        samples: how microbatches are read from these datasets.

    Raises:
        UserError: one of them has another type, or does not accept the arguments that it is called with.
    """

    model: StageProvider | None = None
    datasets: DatasetProvider | None = None
    samples: Samples | None = None

    def __post_init__(self) -> None:
        if self.model is not None:
            check_model_provider(self.model)
        if self.datasets is not None:
            if not callable(self.datasets):
                raise UserError(
                    f"the dataset provider is {kind_of(self.datasets)}: pass a function that takes the "
                    "RunContext and returns DatasetSplits"
                )
            check_call(self.datasets, getattr(self.datasets, "__name__", "the dataset provider"), "run")
        if self.samples is not None and (isinstance(self.samples, type) or not hasattr(self.samples, "read")):
            raise UserError(f"samples is {kind_of(self.samples)}: pass an instance, such as FieldSamples()")


@dataclass(frozen=True)
class RunContext:
    """Objects that all parts of a run share.

    Attributes:
        config: validated, with the vocabulary size.
        tokenizer: None for mock data without one.
        sources: corpora that each split reads; empty for mock data.
        samples: how the model's samples are read from them.
        lease: lease on the checkpoint folder; None if nothing is saved, or no other run can write there.
        providers: builders of the program's own model and datasets.
    """

    config: Config
    topology: Topology
    timers: Timers
    samples: Samples
    tokenizer: Tokenizer | None = None
    sources: Sources = field(default_factory=dict)
    lease: FolderLease | None = None
    providers: Providers = Providers()


def resolve_run(
    config: Config,
    topology: Topology,
    timers: Timers | None = None,
    lease: FolderLease | None = None,
    providers: Providers | None = None,
) -> RunContext:
    """Read the tokenizer and the list of corpora, and fill in the config's values that depend on them.

    Raises:
        UserError: the tokenizer cannot be read, lacks an end-of-document token that the config needs, or has
            more tokens than the vocabulary; a corpus was made with another tokenizer. Raised on every rank.
    """
    sources: Sources = {}
    tokenizer: Tokenizer | None = None
    has_tokenizer = config.data.resolved_tokenizer_type is not None
    providers = providers or Providers()
    has_corpora = not config.data.mock_data and providers.datasets is None
    with topology.agreed() if has_corpora or has_tokenizer else nullcontext():
        if has_tokenizer:
            tokenizer = configured_tokenizer(config.data, config.model.vocab_size)
        if has_corpora:
            sources = find_sources(config.data)
            config = with_shuffle_block(config, sources)
        if tokenizer is not None:
            if topology.rank == 0:
                blends = (blend for of_split in sources.values() for blend in of_split)
                prefixes = (source.prefix for blend in blends for source in blend.sources)
                check_tokenizer(prefixes, tokenizer)
            config = with_vocab_size(config, tokenizer)
        samples = providers.samples or SAMPLES[config.model.architecture](config, tokenizer)
    if tokenizer is not None:
        record = {"the tokenizer's vocabulary": f"{tokenizer.vocab_size} tokens"}
        topology.check_agreement(record, "tokenizer")
        check_config(config, topology.world_size)
    timers = timers or Timers(topology.device, config.logging.timers_level, topology.observers)
    return RunContext(config, topology, timers, samples, tokenizer, sources, lease, providers)


def gpt_samples(config: Config, tokenizer: Tokenizer | None) -> GPTSamples | PackedSamples:
    """Return the samples of a GPT run.

    Raises:
        UserError: an option needs an end-of-document token, and the tokenizer has none.
    """
    if config.data.sft or config.data.packs_documents:
        return packed_samples(config)
    ends = document_ends(config, tokenizer)
    seq_length, seed, vocab_size = config.model.seq_length, config.training.seed, config.model.vocab_size
    order = config.data.reads_windows, config.data.shuffle_block or 1
    return GPTSamples(seq_length, seed, vocab_size, ends, *order)


def packed_samples(config: Config) -> PackedSamples:
    """Return the samples of a run on whole conversations or documents."""
    model, data = config.model, config.data
    assert model.vocab_size is not None
    return PackedSamples(
        PackingOptions(
            model.seq_length,
            config.training.seed,
            model.vocab_size,
            packs=data.sft_packing or data.packs_documents,
            long=data.sft_long_conversations if data.sft else "split",
            only_answers=data.sft,
        ),
        marks_padding=model.has_experts,
    )


SAMPLES: Mapping[str, Callable[[Config, Tokenizer | None], Samples]] = {
    "gpt": gpt_samples,
    "bert": BertSamples.of,
}
"""Functions that describe the samples of a run, by the model's architecture."""


def document_ends(config: Config, tokenizer: Tokenizer | None) -> DocumentEnds | None:
    """Return how the documents of packed samples are found, or None if no option needs them.

    Raises:
        UserError: the tokenizer has no end-of-document token.
    """
    data = config.data
    if not data.document_options:
        return None
    if tokenizer is None or data.resolved_tokenizer_type == "NullTokenizer":
        assert config.model.vocab_size is not None
        eod = config.model.vocab_size - 1  # the null tokenizer's; mock data uses the same
    else:
        eod = tokenizer.eod
    is_rotary = config.model.position_embedding_type == "rope"
    return DocumentEnds(
        eod,
        data.reset_position_ids,
        data.reset_attention_mask,
        data.eod_mask_loss,
        on_every_stage=data.reset_attention_mask or (data.reset_position_ids and is_rotary),
    )


def with_shuffle_block(config: Config, sources: Sources) -> Config:
    """Fill in the number of windows that are shuffled as one, if samples are windows."""
    if config.data.shuffle_block is not None or not config.data.reads_windows:
        return config
    prefixes = (source.prefix for blends in sources.values() for blend in blends for source in blend.sources)
    block = REMOTE_SHUFFLE_BLOCK if any(map(is_in_store, prefixes)) else 1
    return replace(config, data=replace(config.data, shuffle_block=block))


def with_vocab_size(config: Config, tokenizer: Tokenizer) -> Config:
    """Fill in the vocabulary size from the tokenizer, unless the config sets a larger one."""
    size, requested = tokenizer.vocab_size, config.model.vocab_size
    # The null tokenizer adds an end-of-document token to the requested size.
    if requested is not None and config.data.resolved_tokenizer_type != "NullTokenizer":
        if requested < size:
            raise UserError(
                f"the vocabulary size {requested} (of --vocab-size or --preset) is smaller than the "
                f"tokenizer's {size}: pass --vocab-size {size}"
            )
        size = requested
    return replace(config, model=replace(config.model, vocab_size=size))


def build_data(run: RunContext, splits: Collection[str] = SPLIT_NAMES) -> DatasetSplits:
    """Open the corpora, and order the samples of these splits for the whole run; a collective.

    Raises:
        UserError: a corpus is missing or damaged, or differs between ranks; on every rank.
    """
    config, topology = run.config, run.topology
    num_train, num_valid, num_test = (
        number if split in splits else 0
        for split, number in zip(SPLIT_NAMES, num_samples_of(config, topology.sample_ranks.size), strict=True)
    )
    num_samples = num_train, num_valid, num_test
    if run.providers.datasets is not None:
        return _build_own(run, run.providers.datasets, num_samples)
    if config.data.mock_data:
        return build_mock_datasets(run.samples, num_samples)
    datasets: DatasetSplits | None = None
    with run.timers("train/valid/test-data-iterators-setup"):
        opened, record = _open_corpora(run)
        with topology.agreed():
            cache = IndexCache(config.data.data_cache_path)
            batch_size = config.global_batch(topology.sample_ranks.size)
            batches = config.batch_size(topology.sample_ranks.size)
            options = BuildOptions(
                *(run.samples, config.data.blend_by, cache, batch_size, config.training.full_validation),
                lambda iterations: batches.consumed_before(iterations + 1),
            )
            if record is not None:
                datasets = build_from_corpora(run.sources, opened, num_samples, options)
                if isinstance(datasets.train, MixtureDataset):
                    record = replace(record, mixture=datasets.train.plan.record(datasets.train.exhausted))
                datasets = _fill_in_middle(run, datasets)
    datasets = datasets_on_every_stage(datasets, topology)
    datasets = replace(datasets, record=record)
    if (
        config.num_eval_iters(topology.sample_ranks.size) > 0
        and "valid" in splits
        and not datasets.evaluated("valid")
    ):
        log.warning("there is nothing to validate on: --split leaves no sequence for validation")
    return datasets


def _build_own(run: RunContext, provider: DatasetProvider, num_samples: Sequence[int]) -> DatasetSplits:
    """Build the program's own datasets, and check that the run can read them; a collective."""
    first_tokens: dict[str, str] = {}
    with run.topology.agreed():
        datasets = provider(run)
        if not isinstance(datasets, DatasetSplits):
            raise UserError(f"the dataset provider returns {kind_of(datasets)}: return DatasetSplits")
        own: dict[str, Dataset] = {}
        for split, needed in zip(SPLIT_NAMES, num_samples, strict=True):
            dataset = getattr(datasets, split)
            if dataset is None and split == "train" and needed > 0:
                raise UserError("the dataset provider returned no training dataset")
            if dataset is None or needed == 0:
                continue
            if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
                raise UserError(
                    f"the {split} dataset is {kind_of(dataset)}: it needs the methods __len__ and __getitem__"
                )
            is_read_whole = split == "valid" and run.config.training.full_validation
            if len(dataset) < (1 if is_read_whole else needed):
                raise UserError(
                    f"the {split} dataset has {len(dataset)} samples, and the run reads {needed}: let "
                    f"Epochs(dataset, {needed}, seed) repeat it"
                )
            own[split] = _checked(run, split, dataset)
            first_tokens[split] = str(_first_tokens(run, split, own[split]))
        named = tuple(
            each._replace(dataset=_checked(run, f"{each.split} {each.name}", each.dataset))
            for each in datasets.named
        )
        train, valid, test = (own.get(split, getattr(datasets, split)) for split in SPLIT_NAMES)
        datasets = DatasetSplits(train, valid, test, named, datasets.record)
    run.topology.check_agreement(first_tokens, "dataset")
    return datasets


def _checked(run: RunContext, split: str, dataset: Dataset) -> Dataset:
    """Return a dataset that checks its samples; megalite's own datasets already do."""
    model, samples = run.config.model, run.samples
    assert model.vocab_size is not None
    if isinstance(dataset, GatherDataset):
        return dataset
    if isinstance(samples, GPTSamples):
        lengths = {"": model.seq_length + 1}
    elif isinstance(samples, FieldSamples):
        if "position_ids" in samples.fields and run.config.training.seq_length_schedule is not None:
            raise UserError(
                f"the {split} dataset has position_ids of its own, which --seq-length-schedule would change: "
                "remove one"
            )
        lengths = dict.fromkeys(samples.fields, model.seq_length)
    else:
        return dataset
    return CheckedDataset(dataset, split, lengths, model.vocab_size)


def _first_tokens(run: RunContext, split: str, dataset: Dataset) -> list[int]:
    """Return the first tokens of a dataset's first sample.

    Raises:
        UserError: the model cannot read the sample.
    """
    model = run.config.model
    tokens = run.samples.read(dataset, np.arange(1, dtype=np.int64)).tokens
    if tokens.shape != (1, model.seq_length):
        raise UserError(
            f"a sample of the {split} dataset has {tokens.shape[-1]} inputs, and --seq-length is "
            f"{model.seq_length}: pass --seq-length {tokens.shape[-1]}, or other samples"
        )
    return tokens[0, :20].tolist()


def num_samples_of(config: Config, dp: int) -> tuple[int, int, int]:
    """Return the samples that a whole run on `dp` replicas draws from train, valid and test."""
    return num_samples_per_split(
        config.num_samples(dp),
        config.num_iterations(dp),
        config.training.eval_interval,
        config.num_eval_iters(dp),
        config.global_batch(dp),
    )


def _open_corpora(run: RunContext) -> tuple[dict[str, IndexedDataset], DataRecord | None]:
    """Open the corpora on the ranks that read data, and check that these ranks see the same files."""
    opened, record = dict[str, IndexedDataset](), None
    with run.topology.agreed():
        if reads_data(run.topology, run.samples):
            cache_bytes = run.config.data.data_cache_bytes
            opened = open_corpora(run.sources, cache_bytes, not run.samples.are_windows)
            if cache_bytes != CACHE_BYTES and not any(corpus.is_remote for corpus in opened.values()):
                log.warning("--data-cache-bytes has no effect: no corpus is in object storage")
            is_masked = run.config.data.sft
            identities = {
                prefix: CorpusIdentity.of(corpus, LossMask(corpus) if is_masked else None)
                for prefix, corpus in opened.items()
            }
            for prefix in [] if is_masked else [each for each in opened if has_loss_mask(opened[each])]:
                log.warning("%s holds conversations: pass --sft to learn only their answers", prefix)
            record = DataRecord(run.sources, identities, run.config.data.blend_by)
    run.topology.check_agreement(None if record is None else record.for_ranks(), "data")
    return opened, record


def _fill_in_middle(run: RunContext, datasets: DatasetSplits) -> DatasetSplits:
    data = run.config.data
    if data.fim_rate == 0 or datasets.train is None:
        return datasets
    assert run.tokenizer is not None
    names = ("fim_prefix_token", "fim_middle_token", "fim_suffix_token")
    marks = find_marks(run.tokenizer, {flag_of(name): getattr(data, name) for name in names})
    how = FillInMiddle(data.fim_rate, data.fim_spm_rate, *marks, run.config.training.seed)
    return replace(datasets, train=FillInMiddleDataset(datasets.train, run.tokenizer, how))


class UnreadDataset:
    """Stands for a dataset on a stage that reads no data: it only knows the number of samples."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        raise AssertionError("a sample was requested on a stage that reads no data")


def datasets_on_every_stage(datasets: DatasetSplits | None, topology: Topology) -> DatasetSplits:
    """Send the list of datasets to the stages that open no file, so that all ranks evaluate the same.

    Args:
        datasets: None on those stages.
    """
    if topology.pp.size <= 2:
        assert datasets is not None
        return datasets
    own = None if datasets is None else _unread(datasets)
    found = topology.world.object_of_first(own, "the list of datasets")  # rank 0 is on the first stage
    assert found is not None
    return found if datasets is None else datasets


def _unread(datasets: DatasetSplits) -> DatasetSplits:
    def unread(dataset: Dataset | None) -> UnreadDataset | None:
        return None if dataset is None else UnreadDataset(len(dataset))

    named = tuple(each._replace(dataset=UnreadDataset(len(each.dataset))) for each in datasets.named)
    return DatasetSplits(unread(datasets.train), unread(datasets.valid), unread(datasets.test), named)
