"""The objects that all parts of a run share, created once at its start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from megalite.checkpoint.lease import FolderLease
from megalite.config import Config, check_config
from megalite.data.bert_dataset import BertSamples
from megalite.data.build_datasets import DatasetSplits
from megalite.data.corpus_sources import Sources, find_sources
from megalite.data.document_ends import DocumentEnds
from megalite.data.packed_dataset import PackedSamples, PackingOptions
from megalite.data.samples import GPTSamples, Samples
from megalite.data.tokenizers.tokenizer import Tokenizer, configured_tokenizer
from megalite.data.tokenizers.tokenizer_digest import check_tokenizer
from megalite.distributed.topology import Topology
from megalite.model.stage import StageProvider, check_model_provider
from megalite.train.telemetry.timers import Timers
from megalite.utils.errors import UserError, check_call, kind_of

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
        if tokenizer is not None:
            if topology.rank == 0:
                check_tokenizer(_prefixes(sources), tokenizer)
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
    return GPTSamples(config.model.seq_length, config.training.seed, config.model.vocab_size, ends)


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


def _prefixes(sources: Sources) -> Iterator[str]:
    for blends in sources.values():
        for blend in blends:
            yield from (source.prefix for source in blend.sources)
