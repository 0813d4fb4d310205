"""Read pieces of the input, each encoded by one worker; in order they are the whole input."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from megalite.data.preprocessing.compressed_readers import read_rows
from megalite.data.preprocessing.documents import (
    DocumentRecord,
    input_kind,
    open_input,
    read_records,
    read_stream,
)
from megalite.data.preprocessing.preprocess_job import PreprocessJob

_SCAN_BYTES = 1 << 20


class InputPiece(Protocol):
    """Part of the input that holds complete records.

    Attributes:
        num_input_bytes: size of this part of the files, before decompression.
    """

    @property
    def num_input_bytes(self) -> int: ...

    def records(self, job: PreprocessJob) -> Iterator[DocumentRecord]:
        """Yield the records in order, numbered from the start of the piece if it starts inside a file."""
        ...

    @property
    def checksum(self) -> int:
        """Return a checksum of the contents if they are in memory, else 0; a resumed run compares it."""
        ...


@dataclass(frozen=True)
class WholeFiles:
    """One file, or several small files."""

    files: tuple[str, ...]
    num_input_bytes: int
    checksum: int = 0

    def records(self, job: PreprocessJob) -> Iterator[DocumentRecord]:
        for path in self.files:
            yield from read_records(path, job.json_keys, job.text_documents, job.max_document_bytes)


@dataclass(frozen=True)
class RowGroups:
    """Row groups of a Parquet file."""

    path: str
    groups: tuple[int, ...]
    first_row: int  # number of rows before these groups
    num_input_bytes: int
    checksum: int = 0

    def records(self, job: PreprocessJob) -> Iterator[DocumentRecord]:
        rows = read_rows(self.path, job.json_keys, self.groups)
        return (DocumentRecord(self.path, n, "row", row) for n, row in enumerate(rows, self.first_row + 1))


@dataclass(frozen=True)
class InputChunk:
    """Complete lines or paragraphs from the middle of a stream, as the reading process sends them."""

    source: str
    kind: str
    data: bytes
    lines_before: int
    num_input_bytes: int

    @property
    def checksum(self) -> int:
        return zlib.crc32(self.data)

    def records(self, job: PreprocessJob) -> Iterator[DocumentRecord]:
        for record in read_stream(self.source, self.kind, io.BytesIO(self.data), job.max_document_bytes):
            yield record._replace(number=record.number + self.lines_before)


@dataclass(frozen=True)
class ByteRange:
    """Lines of an uncompressed file that start in a range of its bytes."""

    path: str
    begin: int
    end: int
    checksum: int = 0

    @property
    def num_input_bytes(self) -> int:
        return self.end - self.begin

    def records(self, job: PreprocessJob) -> Iterator[DocumentRecord]:
        with open_input(self.path) as (stream, _):
            begin = _line_start(stream, self.begin, self.end)
            if begin is None:
                return
            stop = _line_start(stream, self.end, os.fstat(stream.fileno()).st_size)
            lines = io.BufferedReader(_FileRange(self.path, begin, stop), _SCAN_BYTES)
            kind = input_kind(self.path, job.text_documents)
            yield from read_stream(self.path, kind, lines, job.max_document_bytes)

    def locate(self, number: int) -> int:
        """Return a line's number in the file, given its number in the piece."""
        with open_input(self.path) as (stream, _):
            before = _line_start(stream, self.begin, self.end) or 0
            stream.seek(0)
            while before > 0 and (data := stream.read(min(before, _SCAN_BYTES))):
                number, before = number + data.count(b"\n"), before - len(data)
        return number


def locate(piece: InputPiece, number: int) -> int:
    """Return a record's number in its file, given its number in the piece."""
    return piece.locate(number) if isinstance(piece, ByteRange) else number


def _line_start(stream: BinaryIO, position: int, end: int) -> int | None:
    """Return the first line start at or after a position and before the end; None if there is none."""
    if position == 0:
        return 0 if end > 0 else None
    stream.seek(position - 1)
    at = position - 1
    while at < end - 1 and (data := stream.read(min(_SCAN_BYTES, end - 1 - at))):
        newline = data.find(b"\n")
        if newline >= 0:
            return at + newline + 1
        at += len(data)
    return None


class _FileRange(io.RawIOBase):
    """Stream over a range of a file's bytes."""

    def __init__(self, path: str, begin: int, end: int | None) -> None:
        self._file = open(path, "rb", buffering=0)
        self._file.seek(begin)
        self._left = end - begin if end is not None else None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = self._file.readinto(buffer if self._left is None else buffer[: self._left]) or 0
        self._left = None if self._left is None else self._left - count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
