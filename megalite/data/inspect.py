"""What an indexed dataset holds: counts, lengths, documents, and whether all of it is sound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megalite.data.indexed import IndexedDataset
from megalite.errors import UserError

_BLOCK = 1 << 20
"""Sequences or tokens looked at a time."""
_BAR_WIDTH = 40


@dataclass(frozen=True)
class Summary:
    """The figures of a dataset.

    Attributes:
        num_empty: sequences without a token.
        min_length: of a sequence, in tokens; 0 where there is none, as the next two.
        max_length: likewise.
        min_token: the smallest id.
        max_token: the largest id.
        length_counts: int64, entry 0 the empty sequences, entry k those of 2**(k-1) to 2**k - 1 tokens.
    """

    num_sequences: int
    num_documents: int
    num_tokens: int
    num_empty: int
    min_length: int
    max_length: int
    min_token: int
    max_token: int
    length_counts: npt.NDArray[np.int64]


def summarize(dataset: IndexedDataset) -> Summary:
    """Reads all of a dataset, a block at a time; opening it has checked its index."""
    lengths = dataset.sequence_lengths
    counts = np.zeros(33, np.int64)
    shortest, longest = 2**31, 0
    for block in _blocks(len(lengths)):
        part = lengths[block]
        exponents = np.frexp(part.astype(np.float64))[1]  # k where 2**(k-1) <= length < 2**k, and 0 for 0
        counts += np.bincount(exponents, minlength=len(counts))
        shortest, longest = min(shortest, int(part.min())), max(longest, int(part.max()))
    low, high = _token_range(dataset)
    dataset.check_files()
    return Summary(
        len(dataset), dataset.num_documents, dataset.num_tokens, int(counts[0]),
        min(shortest, longest), longest, low, high, counts,
    )  # fmt: skip


def find_problem(dataset: IndexedDataset, summary: Summary, vocab_size: int | None) -> str | None:
    """What is wrong with a dataset that could be opened, in words; None where all is well.

    Args:
        dataset: whose index is checked by having been opened.
        summary: its figures.
        vocab_size: the ids that its tokens must be below, where it is known.
    """
    limit = np.iinfo(np.int64).max if vocab_size is None else vocab_size
    if summary.min_token >= 0 and summary.max_token < limit:
        return None
    for block in _blocks(dataset.num_tokens):
        wrong = (dataset.tokens[block] < 0) | (dataset.tokens[block] >= limit)
        if wrong.any():
            at = block.start + int(wrong.argmax())
            return (
                f"token id {int(dataset.tokens[at])} at byte {at * dataset.dtype.itemsize} of "
                f"{dataset.prefix}.bin ({_document_at(dataset, at)}) is "
                + ("negative" if vocab_size is None else f"outside the vocabulary of {vocab_size}")
            )
    raise AssertionError("an id outside the range was counted")


def document_tokens(dataset: IndexedDataset, number: int) -> list[npt.NDArray[np.int64]]:
    """The sequences of one document.

    Raises:
        UserError: there is no such document.
    """
    if not 0 <= number < dataset.num_documents:
        raise UserError(
            f"there is no document {number} in {dataset.prefix}: it has {dataset.num_documents}, from 0"
        )
    first, end = dataset.document_index[number : number + 2].tolist()
    return [dataset[i].astype(np.int64) for i in range(first, end)]


def histogram_lines(counts: npt.NDArray[np.int64]) -> Iterator[str]:
    """A line for each range of lengths, with a bar that is proportional to its sequences."""
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


def _token_range(dataset: IndexedDataset) -> tuple[int, int]:
    ranges = [
        (int(dataset.tokens[block].min()), int(dataset.tokens[block].max()))
        for block in _blocks(dataset.num_tokens)
    ]
    return min((low for low, _ in ranges), default=0), max((high for _, high in ranges), default=0)


def _document_at(dataset: IndexedDataset, token: int) -> str:
    """The first document that holds the token at this place of the .bin, in words."""
    byte = token * dataset.dtype.itemsize
    for block in _blocks(len(dataset)):
        starts = dataset.sequence_offsets[block]
        ends = starts + dataset.sequence_lengths[block].astype(np.int64) * dataset.dtype.itemsize
        inside = (starts <= byte) & (byte < ends)
        if inside.any():
            return f"document {dataset.document_of(block.start + int(inside.argmax()))}"
    return "in no sequence"
