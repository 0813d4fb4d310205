"""Safetensors files written one tensor at a time, so that no more than one tensor is in memory.

The format wants names, shapes and types first, in a header: all tensors are announced before any is written.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint.tensor_writer import DTYPE_CODES

FileNames = Callable[[int, int], str]


@dataclass(frozen=True)
class Announced:
    """A tensor that is to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


class StreamedFile:
    """One file that is being written; its tensors come in the order in which they were announced."""

    def __init__(self, path: Path, tensors: Sequence[Announced], metadata: Mapping[str, str]) -> None:
        self.path = path
        self._waiting = list(reversed(tensors))
        self._file = path.open("wb")
        self._file.write(_header(tensors, metadata))

    @property
    def is_full(self) -> bool:
        """Whether every announced tensor was written."""
        return not self._waiting

    def write(self, name: str, tensor: Tensor) -> None:
        """Appends the next tensor."""
        expected = self._waiting.pop()
        assert expected == Announced(name, tensor.dtype, tuple(tensor.shape)), (expected, name)
        content = tensor.detach().contiguous().view(-1).view(torch.uint8)
        self._file.write(content.numpy().data)

    def finish(self) -> None:
        """Ends the file; what was written is on disk then."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Lets go of a file that will not be whole."""
        self._file.close()


class ShardedWriter:
    """Several files of limited size, filled one after the other; a context.

    Args:
        tensors: all of them, in the order in which they will come.
        max_bytes: of one file's tensors, unless one tensor alone has more.
        name_file: makes a file's name of its number, from 1 on, and of how many there are.
        metadata: of each file.

    Attributes:
        files: the files with what stands in each, known from the start.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Sequence[Announced],
        max_bytes: int,
        name_file: FileNames,
        metadata: Mapping[str, str],
    ) -> None:
        shards = list(_shards(tensors, max_bytes))
        self.files = {name_file(number, len(shards)): shard for number, shard in enumerate(shards, start=1)}
        self._folder = folder
        self._metadata = metadata
        self._waiting = iter(self.files.items())
        self._open: StreamedFile | None = None

    def __enter__(self) -> ShardedWriter:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self._open is not None:
            self._open.abandon()
        is_whole = self._open is None and next(self._waiting, None) is None
        assert error is not None or is_whole, "announced tensors are missing"

    def write(self, name: str, tensor: Tensor) -> None:
        """Writes the next tensor, to the next file where the present one is full."""
        if self._open is None:
            file, shard = next(self._waiting)
            self._open = StreamedFile(self._folder / file, shard, self._metadata)
        self._open.write(name, tensor)
        if self._open.is_full:
            self._open.finish()
            self._open = None


def _shards(tensors: Sequence[Announced], max_bytes: int) -> Iterator[list[Announced]]:
    shard, size = list[Announced](), 0
    for tensor in tensors:
        if shard and size + tensor.num_bytes > max_bytes:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += tensor.num_bytes
    if shard:
        yield shard


def _header(tensors: Sequence[Announced], metadata: Mapping[str, str]) -> bytes:
    """Length, then names, types, shapes and places in JSON, with blanks up to a multiple of 8 bytes."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    start = 0
    for tensor in tensors:
        end = start + tensor.num_bytes
        entries[tensor.name] = {
            "dtype": DTYPE_CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
