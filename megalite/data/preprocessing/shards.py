"""Write workers' output files, and join them into one dataset."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from megalite.data.indexed_dataset import DTYPE_CODES, HEADER, MAGIC, VERSION
from megalite.data.tokenizers import IdArray
from megalite.utils.errors import UserError
from megalite.utils.files import new_file

_MAX_LENGTH = 2**31 - 1


class EncodedDocuments(NamedTuple):
    """Encoded documents of one key.

    Attributes:
        sequences: token ids of all documents' sequences, in order.
        counts: number of sequences in each document; None if each has one.
        num_text_bytes: size of the encoded text in UTF-8.
    """

    sequences: list[IdArray]
    counts: list[int] | None
    num_text_bytes: int


def empty_column(dtype: np.dtype[Any]) -> Column:
    """Return an empty column."""
    return Column(np.empty(0, dtype), np.empty(0, COUNTS), np.empty(0, COUNTS))


def pack(documents: EncodedDocuments, dtype: np.dtype[Any], eod: int | None) -> Column:
    """Pack the tokens back to back. Sequences and documents without tokens are skipped, even with an eod.

    Args:
        documents: token ids of each document's sequences.
        dtype: dtype of the tokens.
        eod: token to append to each document's last sequence, or None.

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


def _counts_of_full(documents: EncodedDocuments) -> npt.NDArray[np.int64]:
    """Return the number of sequences with tokens of each document that has any."""
    full = np.fromiter(map(len, documents.sequences), np.int64, len(documents.sequences)) > 0
    if documents.counts is None:
        return np.ones(int(full.sum()), np.int64)
    document = np.repeat(np.arange(len(documents.counts)), documents.counts)
    counts = np.bincount(document[full])
    return counts[counts > 0]


def _with_ends(sequences: list[IdArray], last: npt.NDArray[np.int64], end: IdArray) -> list[IdArray]:
    """Return the sequences, with `end` after each whose number is in `last`."""
    if len(last) == len(sequences):
        return list(itertools.chain.from_iterable(zip(sequences, itertools.repeat(end))))
    is_last = np.zeros(len(sequences), np.bool_)
    is_last[last] = True
    pairs = zip(sequences, is_last.tolist(), strict=True)
    return list(itertools.chain.from_iterable((ids, end) if ends else (ids,) for ids, ends in pairs))


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


def join_shards(
    folder: str, extents: Sequence[Extent], dtype: np.dtype[Any], bin_path: str, idx_path: str
) -> None:
    """Write a .bin and an .idx, and wait until they are on disk.

    Args:
        folder: folder of the shards.
        extents: extents of the pieces, in order.
        dtype: dtype of the tokens.
        bin_path: .bin file to write.
        idx_path: .idx file to write.

    Raises:
        OSError: they cannot be written.
    """
    join_tokens(folder, extents, dtype.itemsize, bin_path)
    with new_file(idx_path) as stream:
        _write_index(folder, extents, dtype, stream)


def join_tokens(folder: str, extents: Sequence[Extent], item_size: int, path: str) -> None:
    """Write the tokens of the pieces back to back, and wait until they are on disk.

    Raises:
        OSError: they cannot be written.
    """
    with new_file(path, 0) as stream:
        _copy(folder, extents, "tokens", item_size, stream)


def _write_index(folder: str, extents: Sequence[Extent], dtype: np.dtype[Any], stream: BinaryIO) -> None:
    code = {name: code for code, name in DTYPE_CODES.items()}[dtype.name]
    num_sequences = sum(extent.sequences[1] for extent in extents)
    num_documents = sum(extent.documents[1] for extent in extents)
    stream.write(HEADER.pack(MAGIC, VERSION, code, num_sequences, num_documents + 1))
    stream.flush()
    _copy(folder, extents, "lengths", COUNTS.itemsize, stream)
    stream.seek(0, os.SEEK_END)
    offset = 0
    for lengths in _blocks(folder, extents, "lengths"):
        ends = offset + np.cumsum(lengths, dtype=np.int64)
        stream.write(((ends - lengths) * dtype.itemsize).astype("<i8").tobytes())
        offset = int(ends[-1])
    first = 0
    stream.write(np.zeros(1, "<i8").tobytes())
    for counts in _blocks(folder, extents, "sequences"):
        ends = first + np.cumsum(counts, dtype=np.int64)
        stream.write(ends.astype("<i8").tobytes())
        first = int(ends[-1])


def _span(extent: Extent, suffix: str) -> tuple[int, int]:
    return {"tokens": extent.tokens, "lengths": extent.sequences, "sequences": extent.documents}[suffix]


def _blocks(folder: str, extents: Sequence[Extent], suffix: str) -> Iterator[npt.NDArray[np.int32]]:
    """Yield the counts of all extents in order, a bounded number at a time."""
    for extent in extents:
        position, left = _span(extent, suffix)
        with open(Path(folder, f"{extent.shard}.{suffix}"), "rb") as file:
            file.seek(position * COUNTS.itemsize)
            while left:
                block = np.fromfile(file, COUNTS, min(left, _BLOCK))
                assert block.size, "a shard is shorter than its extents"
                left -= block.size
                yield block


def _copy(folder: str, extents: Sequence[Extent], suffix: str, item_size: int, to: BinaryIO) -> None:
    for extent in extents:
        position, count = _span(extent, suffix)
        with open(Path(folder, f"{extent.shard}.{suffix}"), "rb", buffering=0) as file:
            copy_range(file.fileno(), to.fileno(), position * item_size, count * item_size)


def copy_range(source: int, target: int, offset: int, count: int) -> None:
    """Copy bytes of one open file to the position of another, which advances.

    The kernel copies if it can; on some file systems it moves no data.
    """
    for copy in (_copy_file_range, _send_file, _read_and_write):
        while count:
            try:
                done = copy(source, target, offset, count)
            except OSError as error:
                if error.errno not in _NOT_HERE or copy is _read_and_write:
                    raise
                break
            assert done, "a shard is shorter than its extents"
            offset, count = offset + done, count - done


def _copy_file_range(source: int, target: int, offset: int, count: int) -> int:
    copy: Callable[..., int] | None = getattr(os, "copy_file_range", None)
    if copy is None:  # not available on this system
        raise OSError(errno.ENOSYS, "no copy_file_range")
    return copy(source, target, count, offset)


def _send_file(source: int, target: int, offset: int, count: int) -> int:
    return os.sendfile(target, source, offset, count)


def _read_and_write(source: int, target: int, offset: int, count: int) -> int:
    return os.write(target, os.pread(source, min(count, _BLOCK), offset))
