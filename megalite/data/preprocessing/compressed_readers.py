"""Read Parquet, Arrow and Zstandard files, and objects of a store as streams."""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

from megalite.utils.errors import UserError, first_line
from megalite.utils.object_store import is_remote, open_object

_BATCH_ROWS = 256
_BATCHES_PER_GROUP = 16
"""Number of record batches of an Arrow file to read as one row group."""


def row_group_sizes(path: str) -> list[int]:
    """Return the number of rows of each row group of a Parquet or Arrow file.

    Raises:
        UserError: it is not such a file, or the library is not installed.
    """
    with _pyarrow_for(path) as pyarrow:
        if not _is_arrow(path):
            metadata = pyarrow.parquet.ParquetFile(_source(path)).metadata
            return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        sizes = [batch.num_rows for batch in _read_arrow(pyarrow, path)[1]]
        return [sum(sizes[i : i + _BATCHES_PER_GROUP]) for i in range(0, len(sizes), _BATCHES_PER_GROUP)]


def read_rows(
    path: str, keys: Sequence[str], groups: Sequence[int] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the rows of row groups, with the columns that the keys name.

    Args:
        path: path of the Parquet or Arrow file.
        keys: columns, or dotted paths whose first part is a column of structs.
        groups: numbers of row groups, from 0; None for all.

    Raises:
        UserError: the file cannot be read or lacks a column, or the library is not installed.
    """
    with _pyarrow_for(path) as pyarrow:
        if _is_arrow(path):
            names, batches = _read_arrow(pyarrow, path)
            columns = _columns(path, keys, names)
            for i, batch in enumerate(batches):
                if groups is None or i // _BATCHES_PER_GROUP in groups:
                    for row in range(0, batch.num_rows, _BATCH_ROWS):
                        yield from batch.select(columns).slice(row, _BATCH_ROWS).to_pylist()
        else:
            file = pyarrow.parquet.ParquetFile(_source(path))
            columns = _columns(path, keys, file.schema_arrow.names)
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=columns, row_groups=groups):
                yield from batch.to_pylist()


def _columns(path: str, keys: Sequence[str], names: Sequence[str]) -> list[str]:
    columns = {key: key if key in names else key.split(".")[0] for key in keys}
    if missing := [key for key, column in columns.items() if column not in names]:
        raise UserError(
            f"{path} has no column {missing[0]!r} (it has {', '.join(names)}): pass another --json-keys"
        )
    return list(dict.fromkeys(columns.values()))


def _source(path: str) -> Any:
    """Return what pyarrow opens: a path, or a stream of an object."""
    return io.BufferedReader(ObjectStream(path), 1 << 20) if is_remote(path) else path


def _is_arrow(path: str) -> bool:
    return path.lower().endswith(".arrow")


def _read_arrow(pyarrow: Any, path: str) -> tuple[list[str], Iterator[Any]]:
    """Return the names of the columns and the record batches of an Arrow file or stream."""
    source = pyarrow.PythonFile(_source(path), mode="r") if is_remote(path) else pyarrow.memory_map(path)
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    if not is_file:  # a stream, as Hugging Face's datasets write it
        stream = pyarrow.ipc.open_stream(source)
        return stream.schema.names, iter(stream)
    file = pyarrow.ipc.open_file(source)
    return file.schema.names, map(file.get_batch, range(file.num_record_batches))


@contextmanager
def _pyarrow_for(path: str) -> Iterator[Any]:
    """Import the library, and raise its errors as UserErrors about this file."""
    try:
        pyarrow = importlib.import_module("pyarrow")
        importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise UserError(
            f"reading {path} needs a package that is not installed: pip install pyarrow"
        ) from None
    try:
        yield pyarrow
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"cannot read {path}: {first_line(error)}") from None


_CHUNK = 1 << 17


def open_zstandard(compressed: BinaryIO) -> BinaryIO:
    """Open the decompressed bytes of an open file of one or more frames.

    Reading raises OSError if the file is damaged and EOFError if it is truncated, as gzip's reader does. The
    library's own stream would end silently.

    Raises:
        UserError: the library is not installed.
    """
    try:
        zstandard = importlib.import_module("zstandard")
    except ImportError:
        raise UserError(
            f"reading {compressed.name} needs a package that is not installed: pip install zstandard"
        ) from None
    return cast(BinaryIO, io.BufferedReader(_ChunkStream(_decompress(compressed, zstandard)), _CHUNK))


def _decompress(compressed: BinaryIO, zstandard: Any) -> Iterator[bytes]:
    frame = None
    while data := compressed.read(_CHUNK):
        while data:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            try:
                yield frame.decompress(data)
            except zstandard.ZstdError as error:
                raise OSError(str(error)) from None
            data = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("the file ends in the middle of its compressed data")


class _ChunkStream(io.RawIOBase):
    """Raw stream over chunks of any size."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = memoryview(chunk)
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


class ObjectStream(io.RawIOBase):
    """Stream of the bytes of an object from `begin` on; a context manager.

    Attributes:
        size: size of the object in bytes.
    """

    def __init__(self, url: str, begin: int = 0) -> None:
        self._object = open_object(url)
        self.size = self._object.size
        self._position = begin

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence]
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        end = min(self._position + len(buffer), self.size)
        if end <= self._position:
            return 0
        data = self._object.read(self._position, end)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)
