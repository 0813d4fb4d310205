"""Exchange records between the pieces of one pass and those of the next, by files.

A task writes one file, whose records are ordered by the task that will read them, block by block, so that its
memory does not grow with its input. The reader collects its records from all files, in the order of the tasks
that wrote them.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from megalite.utils.files import replace_file

_END = struct.Struct("<QQ")
"""The end of a file: number of blocks and of readers."""


class ExchangeWriter:
    """Writer of one file of records; a context manager. The file appears when the block ends.

    The file consists of blocks of records, then for each block its position in bytes, uint64, and where the
    records of each reader start and end in it, uint64 [readers + 1], and then `_END`.

    Args:
        num_readers: number of tasks that will read it.
    """

    def __init__(self, path: Path, num_readers: int) -> None:
        self._num_readers = num_readers
        self._file = replace_file(path)
        self._position = 0
        self._table: list[npt.NDArray[np.uint64]] = []

    def __enter__(self) -> ExchangeWriter:
        self._stream = self._file.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._stream.write(b"".join(row.tobytes() for row in self._table))
            self._stream.write(_END.pack(len(self._table), self._num_readers))
        self._file.__exit__(kind, error, trace)

    def add(self, readers: npt.NDArray[np.integer[Any]], records: npt.NDArray[Any]) -> None:
        """Write a block of records, each to its reader; records of one reader keep their order."""
        order = np.argsort(readers, kind="stable")
        self.add_ordered(np.bincount(readers, minlength=self._num_readers), records[order])

    def add_ordered(self, counts: npt.NDArray[np.integer[Any]], records: npt.NDArray[Any]) -> None:
        """Write a block of records that are ordered by reader, with the number of records of each."""
        self._table.append(np.concatenate([[self._position], [0], np.cumsum(counts)]).astype("<u8"))
        self._stream.write(records.tobytes())
        self._position += records.nbytes


def read_blocks_for(path: Path, reader: int, dtype: np.dtype[Any]) -> Iterator[npt.NDArray[Any]]:
    """Yield the records of one reader in a file, block by block, in the order in which they were added."""
    with open(path, "rb", buffering=0) as stream:
        for position, count in _spans(stream, reader, dtype):
            stream.seek(position)
            block = np.fromfile(stream, dtype, count)
            assert len(block) == count, "the file of an earlier pass is truncated"
            yield block


def read_records_for(paths: Sequence[Path], reader: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the records of one reader in several files, in their order; only these are in memory."""
    size = 0
    for path in paths:
        with open(path, "rb", buffering=0) as stream:
            size += sum(count for _, count in _spans(stream, reader, dtype))
    records, end = np.empty(size, dtype), 0
    for path in paths:
        for block in read_blocks_for(path, reader, dtype):
            records[end : end + len(block)] = block
            end += len(block)
    return records


def _spans(stream: FileIO, reader: int, dtype: np.dtype[Any]) -> Iterator[tuple[int, int]]:
    """Yield the position in bytes of a reader's records in each block, and their number."""
    end = stream.seek(0, os.SEEK_END) - _END.size
    num_blocks, num_readers = _END.unpack(os.pread(stream.fileno(), _END.size, end))
    row_bytes = 8 * (num_readers + 2)
    for row in range(end - num_blocks * row_bytes, end, row_bytes):
        position = int.from_bytes(os.pread(stream.fileno(), 8, row), "little")
        first, last = struct.unpack("<QQ", os.pread(stream.fileno(), 16, row + 8 * (reader + 1)))
        yield position + first * dtype.itemsize, last - first
