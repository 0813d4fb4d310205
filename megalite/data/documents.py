"""Reads documents from files: JSONL, plain text and Parquet, compressed or not, a record at a time."""

from __future__ import annotations

import bz2
import glob
import gzip
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from megalite.data._json_reader import json_texts
from megalite.data.parquet_reader import read_rows
from megalite.data.zstandard_reader import open_zstandard
from megalite.errors import UserError
from megalite.parsing import parse_json

_JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
TEXT_DOCUMENTS = ("file", "line", "paragraph")
STANDARD_INPUT = "-"
MAX_DOCUMENT_BYTES = 1 << 24
"""A document's bytes where nothing else is said: a tokenizer needs about a hundred bytes for each of them."""
_BOM = b"\xef\xbb\xbf"


class RecordError(ValueError):
    """A record that holds no usable document, and why."""


class Record(NamedTuple):
    """One document as it stands in its file, not parsed yet: workers parse.

    Attributes:
        source: the file.
        number: of the line, paragraph or row, from 1.
        kind: "json", "text" or "row"; "bad" where reading has found it unusable.
        data: the bytes, or a Parquet row's columns, or why it is bad.
    """

    source: str
    number: int
    kind: str
    data: Any

    @property
    def num_bytes(self) -> int:
        if isinstance(self.data, dict):
            return sum(len(str(value)) for value in self.data.values())
        return len(self.data)


def find_inputs(patterns: Sequence[str]) -> list[str]:
    """The files that the given files, globs and folders name; sorted within each, folders searched through.

    A file given by its name is taken whatever its suffix, as JSONL if that says nothing else; so is "-",
    standard input.

    Raises:
        UserError: one of them names no file.
    """
    found: list[str] = []
    for pattern in patterns:
        if os.path.isfile(pattern) or pattern == STANDARD_INPUT:
            files = [pattern]
        elif os.path.isdir(pattern):
            files = sorted(
                str(path) for path in Path(pattern).rglob("*") if path.is_file() and _is_known(path)
            )
        else:
            files = sorted(name for name in glob.glob(pattern, recursive=True) if os.path.isfile(name))
        if not files:
            raise UserError(f"--input {pattern} names no file to read")
        found += files
    return found


def _is_known(path: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.parts if part not in (".", ".."))
    # what an earlier run has written beside its .idx: a report, and the tokenizer's digest
    dataset = str(path).removesuffix(".json").removesuffix(".tokenizer")
    report = path.suffix == ".json" and os.path.exists(f"{dataset}.idx")
    known = _format_suffix(path.name) in (*_JSON_SUFFIXES, ".txt", ".parquet")
    return known and not hidden and not report


def _format_suffix(name: str) -> str:
    path = Path(name.lower())
    return Path(path.stem).suffix if path.suffix in _OPENERS else path.suffix


def input_kind(path: str, text_documents: str) -> str:
    """What a file holds, by its suffix: "json" lines, Parquet "rows", or a text's documents."""
    suffix = _format_suffix(path)
    return {".parquet": "rows", ".txt": text_documents}.get(suffix, "json")


def is_compressed(path: str) -> bool:
    """Whether a file is to be decompressed, by its suffix."""
    return Path(path.lower()).suffix in _OPENERS


def read_records(
    path: str, json_keys: Sequence[str], text_documents: str, max_bytes: int = MAX_DOCUMENT_BYTES
) -> Iterator[Record]:
    """The records of one file in their order, in memory one at a time.

    Args:
        path: the file; its suffix says what it is.
        json_keys: columns to read of a Parquet file.
        text_documents: what is one document of a .txt file: "file", "line" or "paragraph".
        max_bytes: a longer record is passed over, and told as a bad one.

    Raises:
        UserError: the file cannot be read, or is cut off or damaged.
    """
    kind = input_kind(path, text_documents)
    if kind == "rows":
        for number, row in enumerate(read_rows(path, json_keys), 1):
            yield Record(path, number, "row", row)
        return
    with open_input(path) as stream:
        yield from read_stream(path, kind, stream, max_bytes)


def read_stream(
    source: str, kind: str, stream: BinaryIO, max_bytes: int = MAX_DOCUMENT_BYTES
) -> Iterator[Record]:
    """The records of an open file, of what `input_kind` says it holds; the other arguments as above."""
    return _STREAM_READERS[kind](source, stream, max_bytes)


@contextmanager
def open_input(path: str) -> Iterator[BinaryIO]:
    """The bytes of a file, decompressed; what goes wrong while they are read is a UserError."""
    with open_with_raw(path) as (stream, _):
        yield stream


@contextmanager
def open_with_raw(path: str) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """As open_input, and the file as it is, whose position tells how much of it is read."""
    opener = _OPENERS.get(Path(path.lower()).suffix)
    try:
        with open(path, "rb") as raw:
            if opener is None:
                yield raw, raw
            else:
                with cast(BinaryIO, opener(raw)) as stream:
                    yield stream, raw
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def parse_records(records: Sequence[Record], json_keys: Sequence[str]) -> list[list[bytes] | RecordError]:
    """The texts of records in UTF-8, one a key; or why there are none.

    JSON that is plain, as nearly all of a corpus is, is read in C++; all else by Python's json module.
    """
    lines = [record.data for record in records if record.kind == "json"]
    plain = iter(json_texts(lines, json_keys))
    found = (next(plain) if record.kind == "json" else None for record in records)
    return [texts or _try_to_parse(record, json_keys) for record, texts in zip(records, found, strict=True)]


def _try_to_parse(record: Record, json_keys: Sequence[str]) -> list[bytes] | RecordError:
    try:
        return parse_record(record, json_keys)
    except RecordError as error:
        return error


def parse_record(record: Record, json_keys: Sequence[str]) -> list[bytes]:
    """The texts of a record in UTF-8, one a key.

    Raises:
        RecordError: it is not valid, or lacks a key, or a value is not text.
    """
    return _PARSERS[record.kind](record.data, json_keys)


def _parse_json(data: bytes, keys: Sequence[str]) -> list[bytes]:
    try:
        value = parse_json(data)
    except ValueError as error:
        raise RecordError(f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RecordError("not a JSON object; each line must be one")
    return _parse_row(value, keys)


def _parse_row(row: dict[str, Any], keys: Sequence[str]) -> list[bytes]:
    return [_encode(_text_at(row, key)) for key in keys]


def _text_at(row: dict[str, Any], key: str) -> str:
    """The text under a key, or under a dotted path of keys where there is none of that very name."""
    value: Any = row
    for part in [key] if key in row else key.split("."):
        if not isinstance(value, dict) or part not in value:
            raise RecordError(f"no key {key!r} (it has {', '.join(map(repr, list(row)[:8]))})")
        value = value[part]
    if not isinstance(value, str):
        raise RecordError(f"the value of {key!r} is {type(value).__name__}, not a text")
    return value


def _parse_bad(why: str, keys: Sequence[str]) -> list[bytes]:
    raise RecordError(why)


def _parse_text(data: bytes, keys: Sequence[str]) -> list[bytes]:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise RecordError(f"not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}") from None
    return [data]


def _encode(text: str) -> bytes:
    """The text in UTF-8, with U+FFFD for each lone surrogate, which JSON allows and no tokenizer takes."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()


_PARSERS: dict[str, Callable[[Any, Sequence[str]], list[bytes]]] = {
    "json": _parse_json,
    "row": _parse_row,
    "text": _parse_text,
    "bad": _parse_bad,
}


_OPENERS: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": open_zstandard,
}
"""Decompressors of an open file, by suffix."""


def read_line(stream: BinaryIO, max_bytes: int) -> bytes | None:
    """The next line, empty at the end; None for a longer one, which is passed over in constant memory."""
    line = stream.readline(max_bytes + 1)
    if len(line) <= max_bytes or line.endswith(b"\n"):
        return line
    while line and not line.endswith(b"\n"):
        line = stream.readline(1 << 20)
    return None


def is_blank(line: bytes) -> bool:
    """Whether a line is empty but for white space."""
    return not line.strip()


def _lines(stream: BinaryIO, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """The numbered lines, without byte-order marks: a file starts with one, and so do those joined to it."""
    number = 1
    while (line := read_line(stream, max_bytes)) != b"":
        yield number, line and line.removeprefix(_BOM)
        number += 1


def _too_long(source: str, number: int, max_bytes: int) -> Record:
    return Record(source, number, "bad", f"longer than the {max_bytes} bytes of --max-document-bytes")


def _read_json_lines(source: str, stream: BinaryIO, max_bytes: int) -> Iterator[Record]:
    for number, line in _lines(stream, max_bytes):
        if line is None:
            yield _too_long(source, number, max_bytes)
        elif not is_blank(line):
            yield Record(source, number, "json", line)


def _read_text_lines(source: str, stream: BinaryIO, max_bytes: int) -> Iterator[Record]:
    for record in _read_json_lines(source, stream, max_bytes):
        text = record.kind == "json"
        yield record._replace(kind="text", data=record.data.rstrip(b"\r\n")) if text else record


def _read_whole(source: str, stream: BinaryIO, max_bytes: int) -> Iterator[Record]:
    data = stream.read(max_bytes + 1)
    long = len(data) > max_bytes
    yield _too_long(source, 1, max_bytes) if long else Record(source, 1, "text", data.removeprefix(_BOM))


def _read_paragraphs(source: str, stream: BinaryIO, max_bytes: int) -> Iterator[Record]:
    """Lines up to a blank one; a paragraph's number is that of its first line."""
    paragraph: list[bytes] = []
    first, size = 0, 0

    def end() -> Iterator[Record]:
        if size > max_bytes:
            yield _too_long(source, first, max_bytes)
        elif paragraph:
            yield Record(source, first, "text", b"".join(paragraph).rstrip(b"\r\n"))

    for number, line in _lines(stream, max_bytes):
        if line is not None and is_blank(line):
            yield from end()
            paragraph, first, size = [], 0, 0
            continue
        first = first or number
        size += max_bytes + 1 if line is None else len(line)
        if line is None or size > max_bytes:
            paragraph.clear()
        else:
            paragraph.append(line)
    yield from end()


_STREAM_READERS: dict[str, Callable[[str, BinaryIO, int], Iterator[Record]]] = {
    "json": _read_json_lines,
    "file": _read_whole,
    "line": _read_text_lines,
    "paragraph": _read_paragraphs,
}
