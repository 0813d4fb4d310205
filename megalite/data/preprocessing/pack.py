"""Packs documents' ids into what a shard holds."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megalite.data.id_array import IdArray
from megalite.data.preprocessing.shard import COUNTS, Column
from megalite.errors import UserError

_MAX_LENGTH = 2**31 - 1


class Documents(NamedTuple):
    """Encoded documents of one key.

    Attributes:
        sequences: ids of all documents' sequences, in order.
        counts: each document's number of sequences; None where each is one.
        num_text_bytes: of what was encoded, in UTF-8.
    """

    sequences: list[IdArray]
    counts: list[int] | None
    num_text_bytes: int


def empty_column(dtype: np.dtype[Any]) -> Column:
    """That of no documents."""
    return Column(np.empty(0, dtype), np.empty(0, COUNTS), np.empty(0, COUNTS))


def pack(documents: Documents, dtype: np.dtype[Any], eod: int | None) -> Column:
    """The tokens back to back; sequences and documents without tokens are left out, also with an eod.

    Args:
        documents: their ids.
        dtype: of the tokens.
        eod: what to add to each document's last sequence; None for nothing.

    Raises:
        UserError: a sequence is too long for a dataset, or an id too large for the type.
    """
    sequences = [ids for ids in documents.sequences if len(ids)]
    if not sequences:
        return empty_column(dtype)
    lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
    counts = _counts_of_full(documents)
    if eod is not None:
        last = np.cumsum(counts) - 1
        sequences = _with_ends(sequences, last, np.array([eod], dtype))
        lengths[last] += 1
    if int(lengths.max()) > _MAX_LENGTH:
        raise UserError(f"a sequence of {int(lengths.max())} tokens is too long: at most {_MAX_LENGTH}")
    tokens = np.concatenate(sequences)
    if int(tokens.max()) > np.iinfo(dtype).max:
        raise UserError(
            f"token id {int(tokens.max())} does not fit into {dtype.name}, the type of the output"
        )
    return Column(tokens.astype(dtype, copy=False), lengths.astype(COUNTS), counts.astype(COUNTS))


def _counts_of_full(documents: Documents) -> npt.NDArray[np.int64]:
    """Each document's number of sequences that have tokens, of documents that have any."""
    full = np.fromiter(map(len, documents.sequences), np.int64, len(documents.sequences)) > 0
    if documents.counts is None:
        return np.ones(int(full.sum()), np.int64)
    document = np.repeat(np.arange(len(documents.counts)), documents.counts)
    counts = np.bincount(document[full])
    return counts[counts > 0]


def _with_ends(sequences: list[IdArray], last: npt.NDArray[np.int64], end: IdArray) -> list[IdArray]:
    """The sequences, and the end after those of these numbers."""
    if len(last) == len(sequences):
        return list(itertools.chain.from_iterable(zip(sequences, itertools.repeat(end))))
    is_last = np.zeros(len(sequences), np.bool_)
    is_last[last] = True
    pairs = zip(sequences, is_last.tolist(), strict=True)
    return list(itertools.chain.from_iterable((ids, end) if ends else (ids,) for ids, ends in pairs))
