"""Cuts the input into pieces: the same ones for any number of workers, but for compressed files."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import BinaryIO

from megalite.data.documents import (
    STANDARD_INPUT,
    input_kind,
    is_blank,
    is_compressed,
    open_with_raw,
    read_line,
)
from megalite.data.parquet_reader import row_group_sizes
from megalite.data.preprocessing.job import PreprocessJob
from megalite.data.preprocessing.pieces import ByteRange, Chunk, Piece, RowGroups, WholeFiles
from megalite.errors import UserError

_MIN_PIECE_BYTES = 4 << 20
_MAX_PIECE_BYTES = 64 << 20
_MAX_PIECES = 1 << 14


class Plan:
    """The pieces of a job's input.

    Neither the files' bytes nor the pieces are held: memory does not grow with the input.

    Attributes:
        stream_compressed: as given.
        total_bytes: of this part of the input, compressed as it is; 0 where that is not known before.
    """

    def __init__(self, job: PreprocessJob, files: Sequence[str], stream_compressed: bool) -> None:
        """Plans a job.

        Args:
            job: what to do.
            files: the inputs' names.
            stream_compressed: cut compressed files up as they are read, by the process that asks for the
                pieces, since there are too few to give a worker one each; they are pieces as a whole if not.
        """
        self._job = job
        self.stream_compressed = stream_compressed
        if STANDARD_INPUT in files and job.partition[1] > 1:
            raise UserError("--partition needs files: standard input cannot be read in parts")
        for path in files:
            if (
                input_kind(path, job.text_documents) in ("file", "line", "paragraph")
                and len(job.json_keys) > 1
            ):
                raise UserError(
                    f"{path} is plain text, which has one text a document: give one key, "
                    f"not {len(job.json_keys)}"
                )
        self.files = files
        self._sizes = [0 if path == STANDARD_INPUT else os.path.getsize(path) for path in files]
        size = sum(self._sizes)
        self._piece_bytes = min(max(size // _MAX_PIECES, _MIN_PIECE_BYTES), _MAX_PIECE_BYTES)
        self.total_bytes = 0 if STANDARD_INPUT in files else size // job.partition[1]

    def pieces(self) -> Iterator[Piece]:
        """The pieces of this part of the input, in order."""
        group: WholeFiles | None = None
        for piece in self._single_pieces():
            if isinstance(piece, WholeFiles) and group is not None:
                size = group.num_input_bytes + piece.num_input_bytes
                if size <= self._piece_bytes:
                    group = replace(group, files=group.files + piece.files, num_input_bytes=size)
                    continue
            if group is not None:
                yield group
            group = piece if isinstance(piece, WholeFiles) else None
            if group is None:
                yield piece
        if group is not None:
            yield group

    def _single_pieces(self) -> Iterator[Piece]:
        begin = 0
        for path, size in zip(self.files, self._sizes, strict=True):
            kind = input_kind(path, self._job.text_documents)
            streamed = path == STANDARD_INPUT or (is_compressed(path) and self.stream_compressed)
            # paragraphs have no ends that could be found from inside a large file
            streamed |= kind == "paragraph" and not is_compressed(path) and size > self._piece_bytes
            if kind == "rows":
                yield from self._row_groups(path, begin, size)
            elif kind in ("json", "line") and not is_compressed(path) and path != STANDARD_INPUT:
                yield from self._byte_ranges(path, begin, size)
            elif self._is_mine(begin):
                whole = WholeFiles((path,), size)
                yield from self._chunks(path, kind) if streamed and kind != "file" else [whole]
            begin += size

    def _is_mine(self, position: int) -> bool:
        """Whether this part of the input has what begins at a position in all files' bytes."""
        index, count = self._job.partition
        return position * count // max(sum(self._sizes), 1) == index

    def _byte_ranges(self, path: str, begin: int, size: int) -> Iterator[Piece]:
        for start in range(0, size, self._piece_bytes):
            if self._is_mine(begin + start):
                if size <= self._piece_bytes:
                    yield WholeFiles((path,), size)
                else:
                    yield ByteRange(path, start, min(start + self._piece_bytes, size))

    def _row_groups(self, path: str, begin: int, size: int) -> Iterator[Piece]:
        rows = row_group_sizes(path)
        for i, _ in enumerate(rows):
            share = range(size * i // len(rows), size * (i + 1) // len(rows))
            if self._is_mine(begin + share.start):
                yield RowGroups(path, (i,), sum(rows[:i]), len(share))

    def _chunks(self, path: str, kind: str) -> Iterator[Piece]:
        source = _open_standard_input() if path == STANDARD_INPUT else open_with_raw(path)
        with source as (stream, raw):
            lines_before, position = 0, 0
            for data, num_lines in _cut(stream, kind, self._job.max_document_bytes):
                # of standard input nothing tells the position but what has come
                now = raw.tell() if path != STANDARD_INPUT else position + len(data)
                yield Chunk(path, kind, data, lines_before, now - position)
                lines_before, position = lines_before + num_lines, now


@contextmanager
def _open_standard_input() -> Iterator[tuple[BinaryIO, BinaryIO]]:
    yield sys.stdin.buffer, sys.stdin.buffer


def _cut(stream: BinaryIO, kind: str, max_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Whole lines or paragraphs of a few MB together, and the number of their lines.

    Of one that is longer than allowed, so much is kept that it is still too long.
    """
    complete = _TO_END_OF[kind]
    while data := stream.read(_MIN_PIECE_BYTES):
        parts = [data]
        num_lines = data.count(b"\n")
        if not data.endswith(b"\n"):
            num_lines += 1
            parts.append(_rest_of_line(stream, max_bytes))
        num_lines += complete(stream, max_bytes, parts)
        yield b"".join(parts), num_lines


def _rest_of_line(stream: BinaryIO, max_bytes: int) -> bytes:
    rest = read_line(stream, max_bytes)
    return b"x" * (max_bytes + 1) + b"\n" if rest is None else rest


def _nothing_more(stream: BinaryIO, max_bytes: int, parts: list[bytes]) -> int:
    return 0


def _rest_of_paragraph(stream: BinaryIO, max_bytes: int, parts: list[bytes]) -> int:
    """Appends the lines up to a blank one, and returns their number."""
    num_lines, size = 0, 0
    while (line := read_line(stream, max_bytes)) != b"":
        num_lines += 1
        if line is None or size <= max_bytes:
            parts.append(b"x" * (max_bytes + 1) + b"\n" if line is None else line)
        size += len(parts[-1])
        if line is not None and is_blank(line):
            break
    return num_lines


_TO_END_OF: dict[str, Callable[[BinaryIO, int, list[bytes]], int]] = {
    "json": _nothing_more,
    "line": _nothing_more,
    "paragraph": _rest_of_paragraph,
}
