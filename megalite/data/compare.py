"""Where two indexed datasets differ."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from megalite.data.indexed import IndexedDataset

_BLOCK = 1 << 16
"""Sequences compared at a time."""


def compare(a: IndexedDataset, b: IndexedDataset) -> str | None:
    """The first thing in which two datasets differ, in words; None where they hold the same documents.

    The token types may differ: the ids are compared.
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
    """The first sequence of both that differs, or else the first document that is cut otherwise."""
    for first in range(0, min(len(a), len(b)), _BLOCK):
        block = range(first, min(first + _BLOCK, len(a), len(b)))
        if not _equal(a, b, block) and (found := _first_in(a, b, block)):
            return found
    shared = min(len(a.document_index), len(b.document_index))
    for first in range(0, shared, _BLOCK):
        end = min(first + _BLOCK, shared)
        differs = a.document_index[first:end] != b.document_index[first:end]
        if differs.any() and (number := first + int(differs.argmax()) - 1) < shared - 1:
            return f"document {number} is the first with another number of sequences"
    return None


def _equal(a: IndexedDataset, b: IndexedDataset, block: range) -> bool:
    """Return whether these consecutive sequences are the same."""
    part = slice(block.start, block.stop)
    same_lengths = bool((a.sequence_lengths[part] == b.sequence_lengths[part]).all())
    return same_lengths and bool((_tokens(a, block) == _tokens(b, block)).all())


def _tokens(dataset: IndexedDataset, block: range) -> npt.NDArray[Any]:
    """Return the tokens of consecutive sequences as one array: they lie back to back."""
    starts = dataset.sequence_offsets[[block[0], block[-1]]] // dataset.dtype.itemsize
    return dataset.tokens[int(starts[0]) : int(starts[1]) + int(dataset.sequence_lengths[block[-1]])]


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
