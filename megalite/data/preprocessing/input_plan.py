"""Describe a preprocessing job, cut its input into pieces, and read them.

One worker encodes each piece, and in order they are the whole input. The pieces are the same for any number
of workers, except in compressed files.
"""

from __future__ import annotations

import hashlib
import io
import os
import sys
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, BinaryIO

import numpy as np

from megalite.data.indexed_dataset import token_dtype
from megalite.data.preprocessing.compressed_readers import read_rows, row_group_sizes
from megalite.data.preprocessing.documents import (
    BOM,
    MAX_DOCUMENT_BYTES,
    STANDARD_INPUT,
    TEXT_DOCUMENTS,
    DocumentRecord,
    FileState,
    file_states,
    input_kind,
    is_compressed,
    open_file,
    open_input,
    read_line,
    read_records,
    read_stream,
)
from megalite.data.tokenizers.chat_template import chat_template_of
from megalite.data.tokenizers.tokenizer import Tokenizer, TokenizerFiles, build_tokenizer, tokenizer_digest
from megalite.utils.errors import UserError


@dataclass(frozen=True)
class PreprocessJob:
    """Inputs and outputs of a job; the result does not depend on the number of workers."""

    inputs: tuple[str, ...]
    """Files, globs and folders, or "-" for standard input."""
    output_prefix: str
    """The output is {output_prefix}_{json_key}_{document|sentence}.bin, .idx and .json."""
    tokenizer_type: str | None
    """Kind of tokenizer; None to detect it from the files."""
    tokenizer_files: TokenizerFiles = field(default_factory=TokenizerFiles)
    """The tokenizer's files."""
    json_keys: tuple[str, ...] = ("text",)
    """Keys of the JSON objects to extract, each to its own dataset; "a.b" is key b of the object a."""
    append_eod: bool = False
    """End each document with the end-of-document token."""
    chat: bool = False
    """Render conversations with the tokenizer's chat template. The only key is the messages' key, and a
    second file, .loss_mask, marks the answers."""
    now: datetime = field(default_factory=datetime.now)
    """The time that a chat template reads."""
    sentence_language: str | None = None
    """ISO 639 code of the language for splitting text into sentences (sequences); None not to split."""
    keep_newlines: bool = False
    """Keep the white space between sentences, at the end of the previous sentence."""
    workers: int = 1
    """Number of processes that encode."""
    text_documents: str = "file"
    """The unit of a .txt file that is one document: "file", "line" or "paragraph"."""
    max_document_bytes: int = MAX_DOCUMENT_BYTES
    """A longer line, paragraph or text file is a bad document."""
    skip_bad_records: bool = False
    """Count and skip bad documents instead of failing at the first."""
    overwrite: bool = False
    """Replace existing output and the files of an interrupted run."""
    resume: bool = False
    """Continue an interrupted run."""
    partition: tuple[int, int] = (0, 1)
    """Part i of n of the input, i from 0; all parts in order are the whole input."""

    @property
    def stem(self) -> str:
        """Return the output prefix, with the part's number if there are several parts."""
        index, count = self.partition
        return self.output_prefix if count == 1 else f"{self.output_prefix}-{index:05}-of-{count:05}"

    def prefix(self, json_key: str) -> str:
        level = "sentence" if self.sentence_language else "document"
        return f"{self.stem}_{json_key}_{level}"

    def column_dtypes(self, tokenizer: Tokenizer) -> list[np.dtype[Any]]:
        """Return the dtype of each column of the shards: the tokens of each key, then the loss mask."""
        tokens = [token_dtype(tokenizer.vocab_size)] * len(self.json_keys)
        return [*tokens, np.dtype(np.uint8)] if self.chat else tokens

    def build_tokenizer(self) -> Tokenizer:
        return build_tokenizer(self.tokenizer_type, self.tokenizer_files)

    def made_with(
        self, files: Sequence[str], states: Sequence[FileState], tokenizer: Tokenizer
    ) -> dict[str, Any]:
        """Return everything that the output depends on, by flag; a resumed run must have the same values."""
        chat = {"--chat": chat_template_of(tokenizer, self.now).digest} if self.chat else {}
        digest = hashlib.sha256()  # of names, sizes and times: reading the contents would take too long
        for name, state in zip(files, states, strict=True):
            digest.update(repr((name, None if name == STANDARD_INPUT else state)).encode())
        return chat | {
            "--input": digest.hexdigest(),
            "--tokenizer-type": tokenizer_digest(tokenizer),
            "--json-keys": list(self.json_keys),
            "--append-eod": self.append_eod,
            "--sentence-language": self.sentence_language,
            "--keep-newlines": self.keep_newlines,
            "--text-documents": self.text_documents,
            "--max-document-bytes": self.max_document_bytes,
            "--on-error": "skip" if self.skip_bad_records else "fail",
            "--partition": "{}/{}".format(*self.partition),
        }


_MIN_PIECE_BYTES = 4 << 20
_MAX_PIECE_BYTES = 64 << 20
_MAX_PIECES = 1 << 14
PIECES_VERSION = 2
"""Version of the way in which the input is cut: a run cannot resume one of another version."""


class InputPlan:
    """Plan of the pieces of a job's input.

    It holds neither the files' bytes nor the pieces: memory does not grow with the input.

    Attributes:
        stream_compressed: whether compressed files are cut as they are read.
        total_bytes: size of this part of the input files, before decompression; 0 if unknown.
    """

    def __init__(
        self,
        job: PreprocessJob,
        files: Sequence[str],
        stream_compressed: bool,
        states: Sequence[FileState] | None = None,
    ) -> None:
        """Plan a job.

        Args:
            files: names of the input files.
            stream_compressed: cut compressed files as they are read, in the process that iterates over the
                pieces, because there are fewer files than workers; otherwise each file is one piece.
            states: the files' states, if they are known.
        """
        self._job = job
        self.stream_compressed = stream_compressed
        if STANDARD_INPUT in files and job.partition[1] > 1:
            raise UserError("--partition needs files: standard input (--input -) cannot be read in parts")
        for path in files if len(job.json_keys) > 1 else ():
            if input_kind(path, job.text_documents) in TEXT_DOCUMENTS:
                raise UserError(
                    f"{path} is plain text, which has one text a document: pass one key in --json-keys, "
                    f"not {len(job.json_keys)}"
                )
        self.files = files
        self._sizes = [size for size, _ in states or file_states(files)]
        self._size = size = sum(self._sizes)
        self._piece_bytes = min(max(size // _MAX_PIECES, _MIN_PIECE_BYTES), _MAX_PIECE_BYTES)
        self.total_bytes = 0 if STANDARD_INPUT in files else size // job.partition[1]

    def pieces(self) -> Iterator[InputPiece]:
        """Yield the pieces of this part of the input, in order; consecutive small files are one piece."""
        files: list[str] = []
        num_bytes = 0
        for piece in self._single_pieces():
            is_whole = isinstance(piece, WholeFiles)
            if files and not (is_whole and num_bytes + piece.num_input_bytes <= self._piece_bytes):
                yield WholeFiles(tuple(files), num_bytes)
                files, num_bytes = [], 0
            if isinstance(piece, WholeFiles):
                files += piece.files
                num_bytes += piece.num_input_bytes
            else:
                yield piece
        if files:
            yield WholeFiles(tuple(files), num_bytes)

    def _single_pieces(self) -> Iterator[InputPiece]:
        begin = 0
        for path, size in zip(self.files, self._sizes, strict=True):
            kind = input_kind(path, self._job.text_documents)
            compressed = is_compressed(path)
            streamed = path == STANDARD_INPUT or (compressed and self.stream_compressed)
            # The start of a paragraph cannot be found from the middle of a large file.
            streamed |= kind == "paragraph" and not compressed and size > self._piece_bytes
            if kind == "rows":
                yield from self._row_groups(path, begin, size)
            elif kind in ("json", "line") and not compressed and path != STANDARD_INPUT:
                yield from self._byte_ranges(path, begin, size)
            elif self._is_mine(begin):
                whole = WholeFiles((path,), size)
                yield from self._chunks(path, kind) if streamed and kind != "file" else [whole]
            begin += size

    def _is_mine(self, position: int) -> bool:
        """Return whether a piece that begins at this byte of all files belongs to this part."""
        index, count = self._job.partition
        return position * count // max(self._size, 1) == index

    def _byte_ranges(self, path: str, begin: int, size: int) -> Iterator[InputPiece]:
        for start in range(0, size, self._piece_bytes):
            if self._is_mine(begin + start):
                if size <= self._piece_bytes:
                    yield WholeFiles((path,), size)
                else:
                    yield ByteRange(path, start, min(start + self._piece_bytes, size))

    def _row_groups(self, path: str, begin: int, size: int) -> Iterator[InputPiece]:
        """Yield the row groups of a large file, or consecutive ones that are small."""
        if size <= self._piece_bytes:
            yield from [WholeFiles((path,), size)] if self._is_mine(begin) else []
            return
        rows = row_group_sizes(path)
        starts = [size * i // max(1, len(rows)) for i in range(len(rows) + 1)]
        mine = [i for i in range(len(rows)) if self._is_mine(begin + starts[i])]
        first = mine[0] if mine else 0
        while mine and first <= mine[-1]:
            end = max(first + 1, bisect_right(starts, starts[first] + self._piece_bytes) - 1)
            end = min(end, mine[-1] + 1)
            groups, num_bytes = tuple(range(first, end)), starts[end] - starts[first]
            yield RowGroups(path, groups, sum(rows[:first]), num_bytes)
            first = end

    def _chunks(self, path: str, kind: str) -> Iterator[InputPiece]:
        standard_input = nullcontext((sys.stdin.buffer, sys.stdin.buffer))
        with standard_input if path == STANDARD_INPUT else open_input(path) as (stream, raw):
            lines_before, position = 0, 0
            for data, num_lines in _cut(stream, kind, self._job.max_document_bytes):
                # Standard input has no position: count what was read.
                now = raw.tell() if path != STANDARD_INPUT else position + len(data)
                yield InputChunk(path, kind, data, lines_before, now - position)
                lines_before, position = lines_before + num_lines, now


def _cut(stream: BinaryIO, kind: str, max_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Yield complete lines or paragraphs, a few MB at a time, and their number of lines.

    A line or paragraph that is too long is cut to a length that is still too long.
    """
    while data := stream.read(_MIN_PIECE_BYTES):
        parts = [data]
        num_lines = data.count(b"\n")
        if not data.endswith(b"\n"):
            num_lines += 1
            parts.append(_next_line(stream, max_bytes))
        if kind == "paragraph":
            num_lines += _rest_of_paragraph(stream, max_bytes, parts)
        yield b"".join(parts), num_lines


def _next_line(stream: BinaryIO, max_bytes: int) -> bytes:
    """Return the rest of the line; a line that is too long is replaced by too many x."""
    line = read_line(stream, max_bytes)
    return b"x" * (max_bytes + 1) + b"\n" if line is None else line


def _rest_of_paragraph(stream: BinaryIO, max_bytes: int, parts: list[bytes]) -> int:
    """Append the lines up to a blank line, and return their number."""
    num_lines, size = 0, 0
    while line := _next_line(stream, max_bytes):
        num_lines += 1
        if size <= max_bytes:
            parts.append(line)
        # Count like the reader of the piece, without byte-order marks: otherwise a paragraph that is not too
        # long would lose lines, and a line with only a mark would not end it.
        content = line.removeprefix(BOM)
        size += len(content)
        if not content.strip():
            break
    return num_lines


_SCAN_BYTES = 1 << 20


@dataclass(frozen=True)
class WholeFiles:
    """One file, or several small files.

    Attributes:
        num_input_bytes: size of this piece of the files, before decompression.
        checksum: checksum of the contents if they are in memory, else 0; a resumed run compares it.
    """

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
            stop = _line_start(stream, self.end, stream.seek(0, os.SEEK_END))
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


InputPiece = WholeFiles | RowGroups | InputChunk | ByteRange
"""Part of the input that holds complete records; inside a file they are numbered from the piece's start."""


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
        self._file = open_file(path)
        self._file.seek(begin)
        self._left = end - begin if end is not None else None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = self._file.readinto(buffer if self._left is None else buffer[: self._left]) or 0  # type: ignore[attr-defined]
        self._left = None if self._left is None else self._left - count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
