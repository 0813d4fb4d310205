"""Inspect an indexed dataset for counts, lengths and damage, and compare two datasets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megalite.data.indexed_dataset import IndexedDataset, blocks_of
from megalite.data.sharded_dataset import ShardedDataset
from megalite.utils.errors import UserError

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
