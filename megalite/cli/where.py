"""Show the corpus, document, offset and text of each sample of an iteration.

megalite where --iteration 1200 --config run.yaml

It takes all flags of megalite train; pass the run's flags. The number of ranks does not matter. With the
run's --dp, it also shows the data-parallel rank of each sample, and for a corpus of megalite prepare the line
of the input file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt

from megalite.config import Config, ParallelConfig, check_config
from megalite.data.bert_dataset import BertDataset
from megalite.data.blend import BlendedDataset, Epochs
from megalite.data.fill_in_middle import FillInMiddleDataset
from megalite.data.gpt_dataset import Dataset, GPTDataset
from megalite.data.mixture import MixtureDataset
from megalite.data.packed_dataset import PackedDataset
from megalite.data.prepare.report import find_source
from megalite.data.tokenizers.tokenizer import Tokenizer, configured_tokenizer
from megalite.data.window_dataset import WindowDataset
from megalite.distributed.rendezvous import Launch
from megalite.distributed.topology import Topology
from megalite.frontends.command_line import parse
from megalite.frontends.tool_parser import ToolParser
from megalite.train.run_context import build_data, resolve_run
from megalite.utils.errors import UserError


def main(arguments: Sequence[str]) -> None:
    """Print the samples. Flags that the tool does not know set the config."""
    parser = ToolParser(description=__doc__)
    parser.add_argument("--iteration", type=int, required=True, help="number of the iteration in the log")
    parser.add_argument(
        "--chars", type=int, default=72, help="characters of text to show per piece (default 72)"
    )
    own, rest = parser.parse_known_args(arguments)
    config, _ = parse(rest)
    tokenizer = (
        None
        if config.data.resolved_tokenizer_type is None
        else configured_tokenizer(config.data, config.model.vocab_size)
    )
    for sample in trace_iteration(config, own.iteration):
        print(_heading(sample))
        for span in sample.spans:
            source = find_source(span.prefix, span.document)
            origin = f" from {source}" if source else ""
            print(f"  {_position(span)}{origin}: {_text(span, tokenizer, own.chars)}")


def _heading(sample: TracedSample) -> str:
    rank = "" if sample.dp_rank is None else f" (dp rank {sample.dp_rank}, microbatch {sample.microbatch})"
    return f"sample {sample.number}{rank}{f': {sample.source}' if sample.source else ''}"


def _position(span: SampleSpan) -> str:
    sequence = "" if span.sequence == span.document else f" sequence {span.sequence}"
    return (
        f"{span.prefix} document {span.document}{sequence} "
        f"tokens {span.offset} to {span.offset + len(span.tokens) - 1}"
    )


def _text(span: SampleSpan, tokenizer: Tokenizer | None, num_chars: int) -> str:
    """Return the start of a piece of text on one line, or its token ids if there is no tokenizer."""
    ids = span.tokens[: num_chars + 1].tolist()  # a token usually has at least one character
    text = repr(tokenizer.decode(ids))[1:-1] if tokenizer else " ".join(map(str, ids))
    return text if len(text) <= num_chars else f"{text[:num_chars]}…"


@dataclass(frozen=True)
class TracedSample:
    """One sample of a past iteration.

    Attributes:
        number: number in the whole run, from 0.
        dp_rank: data-parallel rank that trained on it; None if the config does not set --dp.
        microbatch: index of the microbatch on that rank, from 0; None if the config does not set --dp.
        spans: positions of its tokens in the corpora, in order.
        source: its source and phase in --data-phases; empty without them.
    """

    number: int
    dp_rank: int | None
    microbatch: int | None
    spans: list[SampleSpan]
    source: str = ""


def trace_iteration(config: Config, iteration: int) -> Iterator[TracedSample]:
    """Yield the samples that a run of this config trained on in one iteration, in order.

    The datasets are built as in the run, on one rank: the samples of a global batch are the same for any
    number of ranks. The config must have the run's seed, split, lengths and batch size.

    Args:
        config: the run's config; it must set the global batch size, or dp for the default one.
        iteration: number of the iteration from 1, as in the log.

    Raises:
        UserError: the run has no such iteration; the config is not valid, sets no batch size, or has no
            corpus.
    """
    check_config(config)
    dp = config.parallel.data_parallel_size
    if config.training.global_batch_size is None and dp is None:
        raise UserError("the batch of an iteration is not known: pass --global-batch-size, or the run's --dp")
    if config.data.mock_data:
        raise UserError("--mock-data trains on random tokens, which come from no corpus")
    num_iterations = config.num_iterations(dp or 1)
    if not 1 <= iteration <= num_iterations:
        raise UserError(f"--iteration {iteration} is not in the run: it has {num_iterations}, counted from 1")
    one_rank = replace(
        config,
        parallel=ParallelConfig(distributed_backend="gloo"),
        training=replace(config.training, global_batch_size=config.global_batch(dp or 1)),
    )
    with Topology.start(one_rank.mesh, Launch(0, 1, 0, 1)) as topology:
        dataset = build_data(resolve_run(one_rank, topology)).train
    assert dataset is not None
    mixture = dataset.plain if isinstance(dataset, FillInMiddleDataset) else dataset
    batch_size, block = one_rank.batch_size(1), config.training.micro_batch_size
    first = batch_size.consumed_before(iteration)
    for position in range(batch_size(first)):
        number = first + position
        rank, microbatch = (None, None) if dp is None else (position // block % dp, position // (block * dp))
        source = mixture.describe(number) if isinstance(mixture, MixtureDataset) else ""
        yield TracedSample(number, rank, microbatch, sample_spans(dataset, number), source)


@dataclass(frozen=True)
class SampleSpan:
    """Consecutive tokens of a sample in one sequence of a corpus.

    Attributes:
        sequence: number of the sequence in the corpus; equals `document` if documents have one sequence each.
        offset: position of the first of these tokens in the sequence.
    """

    prefix: str
    document: int
    sequence: int
    offset: int
    tokens: npt.NDArray[Any]


def sample_spans(dataset: Dataset, index: int) -> list[SampleSpan]:
    """Return the spans that make up a sample, in order; their tokens joined are the sample's tokens.

    With fill-in-the-middle, they are the spans of the sample before its documents are cut. For BERT, they are
    the complete sentences, in the document's order, before they are cut, swapped and masked. In
    packed samples, they are the parts of conversations or documents that the sample holds.

    Raises:
        UserError: the dataset does not come from a corpus.
        IndexError: there is no such sample.
    """
    if isinstance(dataset, FillInMiddleDataset):
        return sample_spans(dataset.plain, index)
    if isinstance(dataset, BlendedDataset):
        number = int(dataset.dataset_index[index])
        return sample_spans(dataset.datasets[number], int(dataset.dataset_sample_index[index]))
    if isinstance(dataset, GPTDataset):
        return _gpt_spans(dataset, index)
    if isinstance(dataset, WindowDataset):
        indexed = dataset.indexed
        return [
            SampleSpan(indexed.prefix, indexed.document_of(sequence), sequence, offset, tokens)
            for sequence, offset, tokens in dataset.spans(index)
        ]
    if isinstance(dataset, BertDataset):
        return _bert_spans(dataset, index)
    if isinstance(dataset, Epochs):
        return sample_spans(dataset.dataset, dataset.number(index))
    if isinstance(dataset, PackedDataset):
        return _packed_spans(dataset, index)
    raise UserError("these samples do not come from a corpus: their tokens are random (--mock-data)")


def _gpt_spans(dataset: GPTDataset, index: int) -> list[SampleSpan]:
    if not 0 <= index < len(dataset):
        raise IndexError(f"sample {index} of a dataset of {len(dataset)}")
    indexed = dataset.indexed
    row = int(dataset.index.shuffle_index[index])
    (first, begin), (last, end) = dataset.index.sample_index[row : row + 2].tolist()
    spans = []
    for position in range(first, last + 1):
        sequence = int(dataset.index.document_index[position])
        start = begin if position == first else 0
        tokens = indexed[sequence][start : end + 1 if position == last else None]
        if len(tokens):
            spans.append(SampleSpan(indexed.prefix, indexed.document_of(sequence), sequence, start, tokens))
    return spans


def _bert_spans(dataset: BertDataset, index: int) -> list[SampleSpan]:
    if not 0 <= index < len(dataset):
        raise IndexError(f"sample {index} of a dataset of {len(dataset)}")
    indexed = dataset.indexed
    first, last, _ = dataset.sample_index[index].tolist()
    return [
        SampleSpan(indexed.prefix, indexed.document_of(sequence), sequence, 0, indexed[sequence])
        for sequence in range(first, last)
        if indexed.sequence_lengths[sequence] > 0
    ]


def _packed_spans(dataset: PackedDataset, index: int) -> list[SampleSpan]:
    indexed = dataset.indexed
    return [
        SampleSpan(
            indexed.prefix,
            indexed.document_of(piece.sequence),
            piece.sequence,
            piece.start,
            dataset.tokens_of(piece),
        )
        for piece in dataset.pieces(index)
    ]
