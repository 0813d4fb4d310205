"""Write workers' output files, and join them into one dataset."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megalite.data.indexed_dataset import write_index
from megalite.data.tokenizers import IdArray
from megalite.utils.errors import UserError
from megalite.utils.files import new_file

_MAX_LENGTH = 2**31 - 1


class EncodedDocuments(NamedTuple):
    """Encoded documents of one key.

    Attributes:
        sequences: token ids of all documents' sequences, in order.
        counts: number of sequences in each document.
        num_text_bytes: size of the encoded text in UTF-8.
    """

    sequences: list[IdArray]
    counts: list[int]
    num_text_bytes: int


def empty_column(dtype: np.dtype[Any]) -> Column:
    """Return an empty column."""
    return Column(np.empty(0, dtype), np.empty(0, COUNTS), np.empty(0, COUNTS))


def pack(documents: EncodedDocuments, dtype: np.dtype[Any], eod: int | None) -> Column:
    """Pack the tokens back to back. Sequences and documents without tokens are skipped, even with an eod.

    Args:
        documents: token ids of each document's sequences.
        eod: token to append to each document's last sequence, or None.

    Raises:
        UserError: a sequence is too long for a dataset, or an id too large for the type.
    """
    sizes = np.fromiter(map(len, documents.sequences), np.int64, len(documents.sequences))
    lengths = sizes[sizes > 0]
    if not len(lengths):
        return empty_column(dtype)
    document = np.repeat(np.arange(len(documents.counts)), documents.counts)
    counts = np.bincount(document[sizes > 0])
    counts = counts[counts > 0]
    parts = [ids for ids in documents.sequences if len(ids)]
    if eod is not None:
        end, is_last = np.array([eod], dtype), np.zeros(len(lengths), np.int64)
        is_last[np.cumsum(counts) - 1] = 1
        lengths += is_last
        pairs = zip(parts, is_last.tolist(), strict=True)
        parts = [part for ids, ends in pairs for part in ((ids, end) if ends else (ids,))]
    tokens = np.concatenate(parts)
    if int(tokens.max()) > np.iinfo(dtype).max:
        raise UserError(
            f"token id {int(tokens.max())} does not fit into {dtype.name}, the type of the output"
        )
    if int(lengths.max()) > _MAX_LENGTH:
        raise UserError(f"a sequence of {int(lengths.max())} tokens is too long: at most {_MAX_LENGTH}")
    return Column(tokens.astype(dtype, copy=False), lengths.astype(COUNTS), counts.astype(COUNTS))


COUNTS = np.dtype("<i4")
"""Dtype of sequences' lengths, and of documents' numbers of sequences, in a shard."""


class Extent(NamedTuple):
    """One piece's part of one dataset in a shard; positions and counts are in items, not in bytes."""

    shard: str
    tokens: tuple[int, int]  # position, count
    sequences: tuple[int, int]
    documents: tuple[int, int]


class Column(NamedTuple):
    """Tokens of one key back to back, the sequences' lengths, and sequences per document."""

    tokens: npt.NDArray[Any]
    lengths: npt.NDArray[np.int32]
    sequences: npt.NDArray[np.int32]


FILES = Column._fields
"""Suffixes of a shard's files."""


class ShardWriter:
    """Writer of columns to PATH.tokens, .lengths and .sequences; a context manager.

    The files are only appended to, so the contents of an extent never change.

    Raises:
        OSError: they cannot be written.
    """

    def __init__(self, folder: str, name: str) -> None:
        self._name = name
        self._stack = ExitStack()
        self._files = [
            self._stack.enter_context(open(Path(folder, f"{name}.{suffix}"), "xb", buffering=0))
            for suffix in FILES
        ]
        self._ends = [0, 0, 0]

    def append(self, column: Column) -> Extent:
        """Write a column, and return its extent."""
        spans = []
        for i, (file, values) in enumerate(zip(self._files, column, strict=True)):
            rest = values.view(np.uint8).data
            while rest:
                rest = rest[file.write(rest) :]
            spans.append((self._ends[i], values.size))
            self._ends[i] += values.size
        return Extent(self._name, *spans)

    def flush(self) -> None:
        """Wait until all appended data is on disk."""
        for file in self._files:
            os.fsync(file.fileno())

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def join_extents(first: Extent, second: Extent) -> Extent:
    """Return one extent for two consecutive extents of a shard."""
    spans = ((a[0], a[1] + b[1]) for a, b in zip(first[1:], second[1:], strict=True))
    return Extent(first.shard, *spans)


def append_extent(extents: list[Extent], extent: Extent) -> None:
    """Append an extent, or extend the last extent if it ends where this one begins."""
    last = extents[-1] if extents else None
    if (
        last
        and last.shard == extent.shard
        and all(a[0] + a[1] == b[0] for a, b in zip(last[1:], extent[1:], strict=True))
    ):
        extents[-1] = join_extents(last, extent)
    else:
        extents.append(extent)


_BLOCK = 1 << 20
_NOT_HERE = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM)
"""Errors of a kernel or file system that cannot copy between these files."""


def join_index(folder: str, extents: Sequence[Extent], dtype: np.dtype[Any], path: str) -> None:
    """Write the .idx of the pieces, and wait until it is on disk.

    Args:
        extents: extents of the pieces, in order.

    Raises:
        OSError: it cannot be written.
    """
    sizes = sum(extent.sequences[1] for extent in extents), sum(extent.documents[1] for extent in extents)

    def blocks(suffix: str, spans: list[tuple[int, int]]) -> Iterator[npt.NDArray[np.int32]]:
        for extent, (position, left) in zip(extents, spans, strict=True):
            with open(Path(folder, f"{extent.shard}.{suffix}"), "rb") as file:
                file.seek(position * COUNTS.itemsize)
                while left:
                    block = np.fromfile(file, COUNTS, min(left, _BLOCK))
                    assert block.size, "a shard is shorter than its extents"
                    left -= block.size
                    yield block

    with new_file(path) as stream:
        write_index(
            *(stream, dtype, sizes),
            partial(blocks, "lengths", [extent.sequences for extent in extents]),
            partial(blocks, "sequences", [extent.documents for extent in extents]),
        )


def join_tokens(folder: str, extents: Sequence[Extent], item_size: int, path: str) -> None:
    """Write the tokens of the pieces back to back, and wait until they are on disk.

    Raises:
        OSError: they cannot be written.
    """
    with new_file(path, 0) as stream:
        for extent in extents:
            position, count = extent.tokens
            with open(Path(folder, f"{extent.shard}.tokens"), "rb", buffering=0) as file:
                copy_range(file.fileno(), stream.fileno(), position * item_size, count * item_size)


def copy_range(source: int, target: int, offset: int, count: int) -> None:
    """Copy bytes of one open file to the position of another, which advances.

    The kernel copies if it can; on some file systems it moves no data.
    """
    in_kernel: Callable[..., int] | None = getattr(os, "copy_file_range", None)
    while count:
        try:
            if in_kernel is None:
                done = os.write(target, os.pread(source, min(count, _BLOCK), offset))
            else:
                done = in_kernel(source, target, count, offset)
        except OSError as error:
            if in_kernel is None or error.errno not in _NOT_HERE:
                raise
            in_kernel = None
            continue
        assert done, "a shard is shorter than its extents"
        offset, count = offset + done, count - done
