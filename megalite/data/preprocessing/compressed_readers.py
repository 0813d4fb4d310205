"""Read Parquet and Zstandard files."""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, cast

from megalite.utils.errors import UserError, first_line

_BATCH_ROWS = 256


def row_group_sizes(path: str) -> list[int]:
    """Return the number of rows of each row group, from the file's footer.

    Raises:
        UserError: it is not a Parquet file, or the library is not installed.
    """
    parquet, arrow_error = _import_pyarrow(path)
    try:
        metadata = parquet.ParquetFile(path).metadata
        return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    except arrow_error as error:
        raise UserError(f"cannot read {path}: {first_line(error)}") from None


def read_rows(
    path: str, keys: Sequence[str], groups: Sequence[int] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the rows of row groups, with the columns that the keys name.

    Args:
        path: path of the file.
        keys: columns, or dotted paths whose first part is a column of structs.
        groups: numbers of row groups, from 0; None for all.

    Raises:
        UserError: the file cannot be read or lacks a column, or the library is not installed.
    """
    parquet, arrow_error = _import_pyarrow(path)
    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        columns = [key if key in names else key.split(".")[0] for key in keys]
        missing = [key for key, column in zip(keys, columns, strict=True) if column not in names]
        if missing:
            raise UserError(
                f"{path} has no column {missing[0]!r} (it has {', '.join(names)}): pass another --json-keys"
            )
        columns = list(dict.fromkeys(columns))
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=columns, row_groups=groups):
            yield from batch.to_pylist()
    except arrow_error as error:
        raise UserError(f"cannot read {path}: {first_line(error)}") from None


def _import_pyarrow(path: str) -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow.parquet"), importlib.import_module("pyarrow").ArrowException
    except ImportError:
        raise UserError(
            f"reading {path} needs a package that is not installed: pip install pyarrow"
        ) from None


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
