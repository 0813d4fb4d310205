"""Reads documents from files: JSONL, plain text and Parquet, compressed or not, a record at a time."""

from __future__ import annotations

import bz2
import glob
import gzip
import importlib
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from megalite.data.zstandard_reader import open_zstandard
from megalite.errors import UserError

_JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
TEXT_DOCUMENTS = ("file", "line", "paragraph")
_BOM = b"\xef\xbb\xbf"


class RecordError(ValueError):
    """A record that holds no usable document, and why."""


class Record(NamedTuple):
    """One document as it stands in its file, not parsed yet: workers parse.

    Attributes:
        source: the file.
        number: of the line, paragraph or row, from 1.
        kind: "json", "text" or "row".
        data: the bytes, or a Parquet row's columns.
    """

    source: str
    number: int
    kind: str
    data: Any

    @property
    def num_bytes(self) -> int:
        return (
            len(self.data) if isinstance(self.data, bytes) else sum(len(str(v)) for v in self.data.values())
        )


def find_inputs(patterns: Sequence[str]) -> list[str]:
    """The files that the given files, globs and folders name; sorted within each, folders searched through.

    A file given by its name is taken whatever its suffix, as JSONL if that says nothing else.

    Raises:
        UserError: one of them names no file.
    """
    found: list[str] = []
    for pattern in patterns:
        if os.path.isfile(pattern):
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
    kind, hidden = (
        _format_suffix(path.name),
        any(part.startswith(".") for part in path.parts if part not in (".", "..")),
    )
    return not hidden and kind in (*_JSON_SUFFIXES, ".txt", ".parquet")


def _format_suffix(name: str) -> str:
    path = Path(name.lower())
    return Path(path.stem).suffix if path.suffix in _OPENERS else path.suffix


def read_records(path: str, json_keys: Sequence[str], text_documents: str) -> Iterator[Record]:
    """The records of one file in their order, in memory one at a time.

    Args:
        path: the file; its suffix says what it is.
        json_keys: columns to read of a Parquet file.
        text_documents: what is one document of a .txt file: "file", "line" or "paragraph".

    Raises:
        UserError: the file cannot be read, or is cut off or damaged.
    """
    suffix = _format_suffix(path)
    if suffix == ".txt" and len(json_keys) > 1:
        raise UserError(
            f"{path} is plain text, which has one text a document: give one key, not {len(json_keys)}"
        )
    try:
        if suffix == ".parquet":
            yield from _read_parquet(path, json_keys)
            return
        with _open(path) as stream:
            if suffix == ".txt":
                yield from _TEXT_READERS[text_documents](path, stream)
            else:
                yield from _read_json_lines(path, stream)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def parse_record(record: Record, json_keys: Sequence[str]) -> list[str]:
    """The texts of a record, one a key.

    Raises:
        RecordError: it is not valid, or lacks a key, or a value is not text.
    """
    return [_without_surrogates(text) for text in _PARSERS[record.kind](record.data, json_keys)]


def _parse_json(data: bytes, keys: Sequence[str]) -> list[str]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RecordError("not a JSON object; each line must be one")
    return _parse_row(value, keys)


def _parse_row(row: dict[str, Any], keys: Sequence[str]) -> list[str]:
    for key in keys:
        if key not in row:
            raise RecordError(f"no key {key!r} (it has {', '.join(map(repr, list(row)[:8]))})")
        if not isinstance(row[key], str):
            raise RecordError(f"the value of {key!r} is {type(row[key]).__name__}, not a text")
    return [row[key] for key in keys]


def _parse_text(data: bytes, keys: Sequence[str]) -> list[str]:
    try:
        return [data.decode()]
    except UnicodeDecodeError as error:
        raise RecordError(f"not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}") from None


def _without_surrogates(text: str) -> str:
    """The text with U+FFFD for each lone surrogate, which JSON allows and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


_PARSERS: dict[str, Callable[[Any, Sequence[str]], list[str]]] = {
    "json": _parse_json,
    "row": _parse_row,
    "text": _parse_text,
}


def _open_plain(path: str) -> BinaryIO:
    return open(path, "rb")


_OPENERS: dict[str, Callable[[str], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": open_zstandard,
}
"""By suffix; all open for reading bytes."""


def _open(path: str) -> BinaryIO:
    return cast(BinaryIO, _OPENERS.get(Path(path.lower()).suffix, _open_plain)(path))


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    """The lines of a file without the byte-order mark that some editors write first."""
    for number, line in enumerate(stream):
        yield line.removeprefix(_BOM) if number == 0 else line


def _read_json_lines(path: str, stream: BinaryIO) -> Iterator[Record]:
    for number, line in enumerate(_lines(stream), 1):
        if line.strip():
            yield Record(path, number, "json", line)


def _read_whole(path: str, stream: BinaryIO) -> Iterator[Record]:
    yield Record(path, 1, "text", stream.read().removeprefix(_BOM))


def _read_text_lines(path: str, stream: BinaryIO) -> Iterator[Record]:
    for number, line in enumerate(_lines(stream), 1):
        if line.strip():
            yield Record(path, number, "text", line.rstrip(b"\r\n"))


def _read_paragraphs(path: str, stream: BinaryIO) -> Iterator[Record]:
    """Lines up to a blank one; a paragraph's number is that of its first line."""
    paragraph: list[bytes] = []
    first = 1
    for number, line in enumerate(_lines(stream), 1):
        if line.strip():
            first = number if not paragraph else first
            paragraph.append(line)
        elif paragraph:
            yield Record(path, first, "text", b"".join(paragraph).rstrip(b"\r\n"))
            paragraph = []
    if paragraph:
        yield Record(path, first, "text", b"".join(paragraph).rstrip(b"\r\n"))


_TEXT_READERS: dict[str, Callable[[str, BinaryIO], Iterator[Record]]] = {
    "file": _read_whole,
    "line": _read_text_lines,
    "paragraph": _read_paragraphs,
}


def _read_parquet(path: str, columns: Sequence[str]) -> Iterator[Record]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
        arrow_error = importlib.import_module("pyarrow").ArrowException
    except ImportError:
        raise UserError(
            f"reading {path} needs a package that is not installed: pip install pyarrow"
        ) from None
    try:
        file = parquet.ParquetFile(path)
        missing = [column for column in columns if column not in file.schema_arrow.names]
        if missing:
            raise UserError(f"{path} has no column {missing[0]!r}, but {', '.join(file.schema_arrow.names)}")
        number = 0
        for batch in file.iter_batches(batch_size=1024, columns=list(columns)):
            for row in batch.to_pylist():
                number += 1
                yield Record(path, number, "row", row)
    except arrow_error as error:
        raise UserError(f"cannot read {path}: {str(error).splitlines()[0]}") from None
