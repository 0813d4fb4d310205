"""What one worker has written: tokens and lengths in files of its own, and where each piece lies in them."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

COUNTS = np.dtype("<i4")
"""Type of sequences' lengths, and of documents' numbers of sequences, in a shard."""


class Extent(NamedTuple):
    """Where one piece's part of one dataset lies in a shard; positions and counts of items, not of bytes."""

    shard: str
    tokens: tuple[int, int]  # position, count
    sequences: tuple[int, int]
    documents: tuple[int, int]


class Column(NamedTuple):
    """Documents of one key: tokens back to back, each sequence's length, each document's number of those."""

    tokens: npt.NDArray[Any]
    lengths: npt.NDArray[np.int32]
    sequences: npt.NDArray[np.int32]


FILES = Column._fields
"""Suffixes of a shard's files."""


class ShardWriter:
    """Appends columns to PATH.tokens, .lengths and .sequences; a context manager.

    The files are only ever appended to, so that what an extent names stays as it is, whatever happens later.

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
        """Writes a column, and tells where."""
        spans = []
        for i, (file, values) in enumerate(zip(self._files, column, strict=True)):
            rest = values.view(np.uint8).data
            while rest:
                rest = rest[file.write(rest) :]
            spans.append((self._ends[i], values.size))
            self._ends[i] += values.size
        return Extent(self._name, *spans)

    def flush(self) -> None:
        """Returns once all that was appended is on disk."""
        for file in self._files:
            os.fsync(file.fileno())

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def join_extents(first: Extent, second: Extent) -> Extent:
    """One extent for two that follow each other in a shard."""
    spans = ((a[0], a[1] + b[1]) for a, b in zip(first[1:], second[1:], strict=True))
    return Extent(first.shard, *spans)


def append_extent(extents: list[Extent], extent: Extent) -> None:
    """Appends one, or lengthens the last where it ends where this one begins."""
    last = extents[-1] if extents else None
    if (
        last
        and last.shard == extent.shard
        and all(a[0] + a[1] == b[0] for a, b in zip(last[1:], extent[1:], strict=True))
    ):
        extents[-1] = join_extents(last, extent)
    else:
        extents.append(extent)
