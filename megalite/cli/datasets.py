"""Join and inspect indexed datasets, and train the tokenizers that make them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megalite.data import dataset_merge
from megalite.data.corpus_sources import CorpusSource, parse_until, read_phases, split_bounds
from megalite.data.gpt_dataset import count_tokens
from megalite.data.indexed_dataset import IndexedDataset, blocks_of
from megalite.data.loss_mask import LossMask, has_loss_mask
from megalite.data.mixture import MixtureOrder, MixturePlan, num_samples_until
from megalite.data.sharded_dataset import ShardedDataset, corpus_lengths, list_path, open_dataset
from megalite.data.tokenizers.tokenizer import TOKENIZER_TYPES, Tokenizer, TokenizerFiles, build_tokenizer
from megalite.data.tokenizers.train_tokenizer import DEFAULT_VOCAB_SIZE, TRAINERS, read_texts, write_tokenizer
from megalite.frontends.tool_parser import ToolParser, local_path, positive_int
from megalite.utils.errors import UserError


def merge_datasets(arguments: Sequence[str]) -> None:
    """Join indexed datasets, in the inputs' order, into OUTPUT_PREFIX.bin and .idx, in constant memory.

    With --list, they become the shards of one corpus, OUTPUT_PREFIX.shards.json, and nothing is copied.
    """
    parser = ToolParser(description=merge_datasets.__doc__)
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="PREFIX", help="prefixes, or folders of datasets"
    )
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX")
    listing = "write PREFIX.shards.json, which names the inputs as the shards of one corpus, and copy nothing"
    parser.add_argument("--list", action="store_true", help=listing)
    parser.add_argument("--overwrite", action="store_true", help="replace existing output")
    flags = parser.parse_args(arguments)
    prefixes = dataset_merge.find_prefixes(flags.input)
    if flags.list:
        listed = dataset_merge.list_shards(prefixes, flags.output_prefix, flags.overwrite)
        print(
            f"wrote {list_path(flags.output_prefix)}: {listed.num_documents:,} documents and "
            f"{listed.num_tokens:,} tokens in {len(listed.prefixes)} shards"
        )
        return
    merged = dataset_merge.merge_datasets(prefixes, flags.output_prefix, flags.overwrite)
    print(
        f"wrote {flags.output_prefix}.bin and .idx: {merged.num_documents:,} documents and "
        f"{merged.num_tokens:,} tokens of {len(merged.prefixes)} datasets"
    )


def data_plan(arguments: Sequence[str]) -> None:
    """Show the epochs of each source in each phase of a mixture that changes, and where a source runs out.

    megalite data-plan phases.yaml --tokens 3T --seq-length 8192

    It reads the .idx files of the sources, and orders the samples as a run with these --data-phases does.
    """
    parser = ToolParser(description=data_plan.__doc__)
    add = parser.add_argument
    add("phases", type=local_path, metavar="FILE", help="the file of --data-phases")
    add("--tokens", required=True, metavar="N", help="length of the run, as in 3T, or `5000 samples`")
    add("--seq-length", type=positive_int, required=True, metavar="S", help="tokens of a sample")
    add("--global-batch-size", type=positive_int, metavar="B", help="for phases that end with an iteration")
    add("--split", default="969,30,1", help="the run's --split (%(default)s)")
    flags = parser.parse_args(arguments)
    data = read_phases(flags.phases)
    length = parse_until("--tokens", flags.tokens)
    if length is None:
        raise UserError("--tokens end is no length: pass a number, as in 3T")

    def consumed_after(iterations: int) -> int:
        if flags.global_batch_size is None:
            raise UserError("a phase ends with an iteration: pass the run's --global-batch-size")
        return iterations * int(flags.global_batch_size)

    num_tokens = []
    for source in data.sources:
        lengths = corpus_lengths(source.path)
        if lengths is None:
            raise UserError(f"{source.path}.idx of source {source.name} is not on this machine: copy it")
        sequences = CorpusSource(source.path, *split_bounds(flags.split)["train"]).sequences(len(lengths))
        num_tokens.append(count_tokens(lengths, sequences))
        if num_tokens[-1] <= flags.seq_length:
            raise UserError(
                f"source {source.name} has {num_tokens[-1]} tokens to train on, less than a sample"
            )
    num_samples = num_samples_until(length, flags.seq_length, consumed_after)
    sizes = [(number - 1) // flags.seq_length for number in num_tokens]
    plan = MixturePlan.of(data, sizes, num_samples, flags.seq_length, consumed_after)
    order, ran_out = MixtureOrder(plan), None
    try:
        for _ in order.blocks(num_samples):
            pass
    except UserError as error:  # show the phases up to there
        ran_out = error
    print("\n".join(_mixture_table(plan, order.drawn, num_tokens)))
    for name, at in zip(plan.names, order.exhausted.tolist(), strict=True):
        if at >= 0:
            tokens = at * flags.seq_length
            print(f"{name} runs out at sample {at:,} (token {tokens:,}), in phase {plan.phase_of(at) + 1}")
    if ran_out is not None:
        raise ran_out


def _mixture_table(
    plan: MixturePlan, drawn: npt.NDArray[np.int64], num_tokens: Sequence[int]
) -> Iterator[str]:
    """Yield a row of epochs for each source: a column for each phase, and their sum."""
    numbers = range(1, len(plan.phases) + 1)
    yield f"{'epochs of':16}{'tokens':>20}" + "".join(f"  phase {i:<3}" for i in numbers) + "     all"
    for d, (name, size) in enumerate(zip(plan.names, plan.sizes, strict=True)):
        epochs = [*(drawn[:, d] / size), drawn[:, d].sum() / size]
        yield f"{name:16}{num_tokens[d]:>20,}" + "".join(f"{value:>11.3f}" for value in epochs)
    yield f"{'samples':16}{'':20}" + "".join(f"{n:>11,}" for n in [*drawn.sum(1).tolist(), int(drawn.sum())])


def _inspection_parser() -> ToolParser:
    """Build the parser, with megalite preprocess's flags for the tokenizer."""
    parser = ToolParser(description=inspect_dataset.__doc__)
    add = parser.add_argument
    add("prefix", nargs="*", metavar="PREFIX", help="path of the dataset without .bin and .idx")
    add("--compare", nargs=2, metavar=("A", "B"), help="show where two datasets differ")
    add(
        "--document",
        type=int,
        metavar="I",
        help="print document I, as text if a tokenizer is passed; in a conversation, answers are apart",
    )
    add("--tokenizer-type", choices=TOKENIZER_TYPES, metavar="TYPE", help=", ".join(TOKENIZER_TYPES))
    add("--tokenizer-model", metavar="FILE", help="a tokenizer.json or a SentencePiece model")
    add("--tokenizer-name-or-path", metavar="FOLDER", help="the folder of a tokenizer.json")
    add("--vocab-file", metavar="FILE", help="GPT-2's vocab.json, or BERT's vocab.txt")
    add("--merge-file", metavar="FILE", help="GPT-2's merges.txt")
    add(
        "--vocab-size",
        type=int,
        metavar="N",
        help="report token ids of N or above as damage (default the tokenizer's size)",
    )
    return parser


def inspect_dataset(arguments: Sequence[str]) -> None:
    """Check indexed datasets. Show counts, lengths, tokens, one document as text, or the difference of two.

    megalite inspect-dataset PREFIX
    megalite inspect-dataset PREFIX --document 17 --tokenizer-model tokenizer.json
    megalite inspect-dataset --compare A B

    The exit status is 1 if a dataset is damaged, a token id is outside of the vocabulary, or two datasets
    differ.
    """
    flags = _inspection_parser().parse_args(arguments)
    if bool(flags.prefix) == bool(flags.compare) or (flags.document is not None and len(flags.prefix) != 1):
        raise UserError("pass one or several PREFIXes, or --compare A B; --document needs exactly one PREFIX")
    if flags.compare:
        difference = compare(*map(open_dataset, flags.compare))
        if difference:
            raise UserError(difference)
        print("the same documents")
        return
    tokenizer = _tokenizer(flags)
    if flags.document is not None:
        _print_document(open_dataset(flags.prefix[0]), flags.document, tokenizer)
        return
    vocab_size = tokenizer.vocab_size if tokenizer else flags.vocab_size
    for prefix in flags.prefix:
        _print_summary(open_dataset(prefix), vocab_size)


def _tokenizer(flags: argparse.Namespace) -> Tokenizer | None:
    named = flags.tokenizer_model, flags.vocab_file, flags.merge_file, flags.tokenizer_name_or_path
    if not any((flags.tokenizer_type, *named)):
        return None
    return build_tokenizer(flags.tokenizer_type, TokenizerFiles(*named, flags.vocab_size))


def _print_document(dataset: IndexedDataset, number: int, tokenizer: Tokenizer | None) -> None:
    sequences = document_tokens(dataset, number)
    if not has_loss_mask(dataset):
        for tokens in sequences:
            print(_text(tokens, tokenizer))
        return
    mask, first = LossMask(dataset), int(dataset.document_index[number])
    for i, tokens in enumerate(sequences, first):
        for is_answer, part in answers_and_others(tokens, mask[i]):
            print(f"{'answer' if is_answer else 'other':6}  {_text(part, tokenizer)!r}")


def _text(tokens: npt.NDArray[np.int64], tokenizer: Tokenizer | None) -> str:
    ids = tokens.tolist()
    return tokenizer.decode(ids) if tokenizer else " ".join(map(str, ids))


def _print_summary(dataset: IndexedDataset, vocab_size: int | None) -> None:
    summary = summarize(dataset)
    print(_describe(dataset, summary))
    print("\n".join(histogram_lines(summary.length_counts)))
    if problem := find_problem(dataset, summary, vocab_size):
        raise UserError(problem)


def _describe(dataset: IndexedDataset, summary: DatasetSummary) -> str:
    mean = dataset.num_tokens / max(1, len(dataset))
    lines = (
        f"{dataset.prefix}",
        f"  documents  {dataset.num_documents:,}",
        f"  sequences  {len(dataset):,}, {summary.num_empty:,} of them empty",
        f"  tokens     {dataset.num_tokens:,} of type {dataset.dtype.name}, "
        f"ids {summary.min_token} to {summary.max_token}",
        f"  lengths    {summary.min_length:,} to {summary.max_length:,} tokens, {mean:,.1f} on average",
    )
    return "\n".join(lines)


def train_tokenizer(arguments: Sequence[str]) -> None:
    """Train a tokenizer on a corpus: byte-level BPE as a tokenizer.json, or a SentencePiece model.

    megalite train-tokenizer --input corpus/ --output tokenizer.json --vocab-size 50304
    megalite train-tokenizer --input *.jsonl.zst --type sentencepiece-unigram --output spm.model

    The same input and vocabulary size give the same tokenizer. It encodes any text without loss.
    """
    parser = ToolParser(description=train_tokenizer.__doc__)
    add = parser.add_argument
    inputs = "files, globs or folders, as for megalite preprocess"
    add("--input", nargs="+", required=True, metavar="PATH", help=inputs)
    output = "the tokenizer.json or .model to write"
    add("--output", type=local_path, required=True, metavar="FILE", help=output)
    types = f"type of the tokenizer: {', '.join(TRAINERS)} (%(default)s)"
    add("--type", choices=tuple(TRAINERS), default="bpe", metavar="TYPE", help=types)
    add(
        "--vocab-size",
        type=int,
        metavar="N",
        help=f"number of tokens, with special tokens ({DEFAULT_VOCAB_SIZE}; bpe: fewer for a short text)",
    )
    add("--json-key", default="text", metavar="KEY", help="key of a document's text (text)")
    add("--max-documents", type=int, metavar="N", help="train on the first N documents (all)")
    add("--overwrite", action="store_true", help="replace an existing tokenizer")
    flags = parser.parse_args(arguments)

    texts = read_texts(flags.input, flags.json_key, flags.max_documents)
    train = TRAINERS[flags.type]
    num_tokens = write_tokenizer(flags.output, lambda: train(texts, flags.vocab_size), flags.overwrite)
    print(f"wrote {flags.output}: {num_tokens:,} tokens")


_BLOCK = 1 << 20
"""Number of sequences or tokens to read at a time."""
_BAR_WIDTH = 40


@dataclass(frozen=True)
class DatasetSummary:
    """Statistics of a dataset.

    Attributes:
        num_empty: number of sequences without tokens.
        min_length: shortest sequence in tokens; this and the next three are 0 for an empty dataset.
        max_length: longest sequence in tokens.
        min_token: smallest token id.
        max_token: largest token id.
        length_counts: int64 counts of sequences: entry 0 of empty ones, entry k of those with 2**(k-1) to
            2**k - 1 tokens.
    """

    num_empty: int
    min_length: int
    max_length: int
    min_token: int
    max_token: int
    length_counts: npt.NDArray[np.int64]


def summarize(dataset: IndexedDataset) -> DatasetSummary:
    """Read a whole dataset, one block at a time; opening it has checked its index."""
    lengths = dataset.sequence_lengths
    counts = np.zeros(33, np.int64)
    shortest, longest = 2**31, 0
    for part in blocks_of(lengths):
        exponents = np.frexp(part.astype(np.float64))[1]  # k where 2**(k-1) <= length < 2**k, and 0 for 0
        counts += np.bincount(exponents, minlength=len(counts))
        shortest, longest = min(shortest, int(part.min())), max(longest, int(part.max()))
    ranges = [(int(block.min()), int(block.max())) for block in dataset.token_blocks()]
    low, high = min((low for low, _ in ranges), default=0), max((high for _, high in ranges), default=0)
    dataset.check_files()
    return DatasetSummary(int(counts[0]), min(shortest, longest), longest, low, high, counts)


def find_problem(dataset: IndexedDataset, summary: DatasetSummary, vocab_size: int | None) -> str | None:
    """Return what is wrong with an opened dataset, or None.

    Args:
        dataset: the dataset; opening it has checked its index.
        vocab_size: upper bound of its token ids, if known.
    """
    if isinstance(dataset, ShardedDataset) and (altered := dataset.first_altered()) is not None:
        return altered
    limit = np.iinfo(np.int64).max if vocab_size is None else vocab_size
    if summary.min_token >= 0 and summary.max_token < limit:
        return None
    for block in _blocks(dataset.num_tokens):
        tokens = dataset.read_tokens(block.start, block.stop)
        wrong = (tokens < 0) | (tokens >= limit)
        if wrong.any():
            at = block.start + int(wrong.argmax())
            return (
                f"token id {int(tokens[at - block.start])} at byte {at * dataset.dtype.itemsize} of "
                f"{dataset.prefix}.bin ({_document_at(dataset, at)}) is "
                + ("negative" if vocab_size is None else f"outside the vocabulary of {vocab_size}")
            )
    raise AssertionError("an id outside the range was counted")


def document_tokens(dataset: IndexedDataset, number: int) -> list[npt.NDArray[np.int64]]:
    """Return the sequences of one document.

    Raises:
        UserError: there is no such document.
    """
    if not 0 <= number < dataset.num_documents:
        raise UserError(
            f"there is no document {number} in {dataset.prefix}: it has {dataset.num_documents}, numbered "
            "from 0"
        )
    first, end = dataset.document_index[number : number + 2].tolist()
    return [dataset[i].astype(np.int64) for i in range(first, end)]


def answers_and_others(
    tokens: npt.NDArray[np.int64], is_answer: npt.NDArray[np.bool_]
) -> list[tuple[bool, npt.NDArray[np.int64]]]:
    """Divide a conversation where answers begin and end; return whether each part is an answer."""
    ends = np.flatnonzero(np.diff(is_answer)) + 1
    marks = np.split(is_answer, ends)
    return [
        (bool(mark[0]), part) for mark, part in zip(marks, np.split(tokens, ends), strict=True) if len(part)
    ]


def histogram_lines(counts: npt.NDArray[np.int64]) -> Iterator[str]:
    """Yield a line for each range of lengths, with a bar proportional to its number of sequences."""
    used = np.flatnonzero(counts)
    if not len(used):
        return
    largest = int(counts.max())
    for k in range(int(used[0]), int(used[-1]) + 1):
        low, high = (0, 0) if k == 0 else (2 ** (k - 1), 2**k - 1)
        bar = "#" * -(-_BAR_WIDTH * int(counts[k]) // largest)
        yield f"{low:>10,} to {high:>10,} tokens: {int(counts[k]):>12,} {bar}".rstrip()


def _blocks(total: int) -> Iterator[slice]:
    for first in range(0, total, _BLOCK):
        yield slice(first, min(first + _BLOCK, total))


def _document_at(dataset: IndexedDataset, token: int) -> str:
    """Return the first document that holds the token at this position of the .bin, as text."""
    byte = token * dataset.dtype.itemsize
    for block in _blocks(len(dataset)):
        starts = dataset.sequence_offsets[block]
        ends = starts + dataset.sequence_lengths[block].astype(np.int64) * dataset.dtype.itemsize
        inside = (starts <= byte) & (byte < ends)
        if inside.any():
            return f"document {dataset.document_of(block.start + int(inside.argmax()))}"
    return "in no sequence"


_COMPARED_SEQUENCES = 1 << 16
"""Number of sequences to compare at a time."""


def compare(a: IndexedDataset, b: IndexedDataset) -> str | None:
    """Return the first difference between two datasets; None if they hold the same documents.

    The token dtypes may differ: only the ids are compared.
    """
    difference = _first_difference(a, b)
    a.check_files()
    b.check_files()
    for name, left, right in (
        ("documents", a.num_documents, b.num_documents),
        ("sequences", len(a), len(b)),
        ("tokens", a.num_tokens, b.num_tokens),
    ):
        if left != right:
            counts = f"{a.prefix} has {left} {name} and {b.prefix} {right}"
            return f"{counts}; {difference or 'one is the beginning of the other'}"
    return difference


def _first_difference(a: IndexedDataset, b: IndexedDataset) -> str | None:
    """Return the first sequence that differs, or else the first document with other sequences."""
    for first in range(0, min(len(a), len(b)), _COMPARED_SEQUENCES):
        block = range(first, min(first + _COMPARED_SEQUENCES, len(a), len(b)))
        if not _equal(a, b, block) and (found := _first_in(a, b, block)):
            return found
    shared = min(len(a.document_index), len(b.document_index))
    for first in range(0, shared, _COMPARED_SEQUENCES):
        end = min(first + _COMPARED_SEQUENCES, shared)
        differs = a.document_index[first:end] != b.document_index[first:end]
        if differs.any() and (number := first + int(differs.argmax()) - 1) < shared - 1:
            return f"document {number} is the first with another number of sequences"
    return None


def _equal(a: IndexedDataset, b: IndexedDataset, block: range) -> bool:
    part = slice(block.start, block.stop)
    same_lengths = bool((a.sequence_lengths[part] == b.sequence_lengths[part]).all())
    return same_lengths and bool((_tokens(a, block) == _tokens(b, block)).all())


def _tokens(dataset: IndexedDataset, block: range) -> npt.NDArray[Any]:
    """Return the tokens of consecutive sequences, which are back to back, as one array."""
    first, last = (int(dataset.sequence_offsets[i]) // dataset.dtype.itemsize for i in (block[0], block[-1]))
    return dataset.read_tokens(first, last + int(dataset.sequence_lengths[block[-1]]))


def _first_in(a: IndexedDataset, b: IndexedDataset, block: range) -> str | None:
    for sequence in block:
        left, right = a[sequence], b[sequence]
        shared = min(len(left), len(right))
        differs = left[:shared] != right[:shared]
        if len(left) == len(right) and not differs.any():
            continue
        at = int(differs.argmax()) if differs.any() else shared
        return (
            f"the first difference is in document {a.document_of(sequence)}, sequence {sequence}, "
            f"token {at}: {_token(left, at)} and {_token(right, at)}"
        )
    return None


def _token(tokens: npt.NDArray[Any], at: int) -> str:
    return f"id {int(tokens[at])}" if at < len(tokens) else f"its end ({len(tokens)} tokens)"
