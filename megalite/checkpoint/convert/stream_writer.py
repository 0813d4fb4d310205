"""Write safetensors files one tensor at a time, so that at most one tensor is in memory.

The format begins with a header of names, shapes and dtypes, so all tensors are declared before any is
written.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint.tensor_files import safetensors_header

FileNames = Callable[[int, int], str]


@dataclass(frozen=True)
class TensorInfo:
    """Declares a tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


class StreamedFile:
    """Writes one file. Its tensors must be added in the order in which they were declared."""

    def __init__(self, path: Path, tensors: Sequence[TensorInfo], metadata: Mapping[str, str]) -> None:
        self.path = path
        self._waiting = list(reversed(tensors))
        self._file = path.open("wb")
        declared = ((tensor.name, tensor.dtype, tensor.shape) for tensor in tensors)
        self._file.write(safetensors_header(declared, metadata))

    @property
    def is_full(self) -> bool:
        """Return whether every declared tensor was written."""
        return not self._waiting

    def write(self, name: str, tensor: Tensor) -> None:
        """Append the next tensor."""
        expected = self._waiting.pop()
        assert expected == TensorInfo(name, tensor.dtype, tuple(tensor.shape)), (expected, name)
        content = tensor.detach().contiguous().view(-1).view(torch.uint8)
        self._file.write(content.numpy().data)

    def finish(self) -> None:
        """Close the file once it is on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Close a file that stays incomplete."""
        self._file.close()


class ShardedWriter:
    """Writes several files of limited size, one after the other; a context manager.

    Args:
        tensors: all tensors, in the order in which they will be added.
        max_bytes: maximum size of a file's tensors, unless a single tensor is larger.
        name_file: returns a file's name for its number, from 1, and the number of files.
        metadata: metadata of each file.

    Attributes:
        files: the tensors of each file, known from the start.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Sequence[TensorInfo],
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
        assert error is not None or is_whole, "declared tensors are missing"

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor, to the next file if the current one is full."""
        if self._open is None:
            file, shard = next(self._waiting)
            self._open = StreamedFile(self._folder / file, shard, self._metadata)
        self._open.write(name, tensor)
        if self._open.is_full:
            self._open.finish()
            self._open = None


def _shards(tensors: Sequence[TensorInfo], max_bytes: int) -> Iterator[list[TensorInfo]]:
    shard, size = list[TensorInfo](), 0
    for tensor in tensors:
        if shard and size + tensor.num_bytes > max_bytes:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += tensor.num_bytes
    if shard:
        yield shard
