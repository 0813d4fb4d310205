"""Joins the workers' shards to one dataset: offsets by arithmetic, bytes from file to file in the kernel."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from megalite.data.indexed import DTYPE_CODES, HEADER, MAGIC, VERSION
from megalite.data.preprocessing.shard import COUNTS, Extent
from megalite.folders import open_new

_BLOCK = 1 << 20
_NOT_HERE = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM)
"""What a kernel or file system says that cannot copy between these files by itself."""


def join(folder: str, extents: Sequence[Extent], dtype: np.dtype[Any], bin_path: str, idx_path: str) -> None:
    """Writes a .bin and an .idx, on disk when this returns.

    Args:
        folder: where the shards are.
        extents: of the pieces, in order.
        dtype: of the tokens.
        bin_path: file to write.
        idx_path: file to write.

    Raises:
        OSError: they cannot be written.
    """
    with open_new(bin_path, 0) as stream:
        _copy(folder, extents, "tokens", dtype.itemsize, stream)
        os.fsync(stream.fileno())
    with open_new(idx_path) as stream:
        _write_index(folder, extents, dtype, stream)
        stream.flush()
        os.fsync(stream.fileno())


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
    """The counts of all extents in their order, a bounded number at a time."""
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
    """Copies bytes of one open file to the position of another, which moves on.

    The kernel does it where it can, on some file systems without moving any data.
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
    if copy is None:  # not on this system
        raise OSError(errno.ENOSYS, "no copy_file_range")
    return copy(source, target, count, offset)


def _send_file(source: int, target: int, offset: int, count: int) -> int:
    return os.sendfile(target, source, offset, count)


def _read_and_write(source: int, target: int, offset: int, count: int) -> int:
    return os.write(target, os.pread(source, min(count, _BLOCK), offset))
