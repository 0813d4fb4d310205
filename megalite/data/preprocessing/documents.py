"""Read documents from files: JSONL, plain text, Parquet and Arrow, one record at a time."""

from __future__ import annotations

import bz2
import glob
import gzip
import io
import lzma
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from megalite.data._json_reader import json_texts
from megalite.data.preprocessing.compressed_readers import ObjectStream, open_zstandard, read_rows
from megalite.data.tokenizers.hf_tokenizer import json_object
from megalite.utils.errors import ConfigError, UserError
from megalite.utils.files import parse_json
from megalite.utils.log import log
from megalite.utils.object_store import find_objects, is_remote, open_object

_KINDS = {
    "jsonl": "json",
    "json": "json",
    "ndjson": "json",
    "txt": "text",
    "parquet": "rows",
    "arrow": "rows",
}
_FORMATS = ".jsonl, .txt, .parquet or .arrow"
_OTHER_FORMATS = {
    **{"csv": "CSV", "tsv": "CSV", "warc": "WARC", "wet": "WARC", "wat": "WARC"},
    **{"tar": "tar", "tgz": "tar", "zip": "ZIP"},
}
TEXT_DOCUMENTS = ("file", "line", "paragraph")
STANDARD_INPUT = "-"
MAX_DOCUMENT_BYTES = 1 << 24
"""Default limit of a document's bytes: a tokenizer needs about 100 bytes of memory for each byte."""
BOM = b"\xef\xbb\xbf"
_REQUEST_BYTES = 8 << 20
"""Bytes of one request to object storage."""
_SMALL_BYTES = 1 << 16
_NUM_TIMED, _FAST_SECONDS = 8, 1e-4
"""Number of files whose states are timed, and the time for each below which threads would take longer."""


class RecordError(ValueError):
    """Raised for a record without a usable document; the message says why."""


class DocumentRecord(NamedTuple):
    """One document as it is in its file; workers parse it.

    Attributes:
        number: number of the line, paragraph or row, from 1.
        kind: "json", "text" or "row"; "bad" if it cannot be used.
        data: the bytes, or a row's columns, or the reason why it is bad.
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
    """Return the files that files, globs and folders name, also as URLs; folders are searched recursively.

    A file named directly is read whatever its suffix, as JSONL if the suffix is unknown; "-" is standard
    input. The files of a glob or a folder are sorted.

    Raises:
        ConfigError: some of the inputs name no file, or a file of a format that is not read.
    """
    found: list[str] = []
    problems: list[str] = []
    for pattern in patterns:
        if os.path.isfile(pattern) or pattern == STANDARD_INPUT:
            files = [pattern]
        elif is_remote(pattern):
            try:
                found_objects = find_objects(pattern)
            except UserError as error:
                problems.append(f"--input {pattern}: {error}")
                continue
            is_folder = found_objects != [pattern] and "*" not in pattern
            files = [name for name in found_objects if not is_folder or _suffixes(name)[0] in _KINDS]
        elif os.path.exists(os.path.join(pattern, "dataset_dict.json")):
            problems.append(f"--input {pattern} holds several splits of a dataset: pass the folder of one")
            continue
        elif os.path.isdir(pattern):
            files = _files_in(pattern)
        else:
            files = sorted(name for name in glob.glob(pattern, recursive=True) if os.path.isfile(name))
        if not files:
            problems.append(f"--input {pattern} names no file: pass files, globs or folders")
        for file in files:
            if kind := _OTHER_FORMATS.get(_suffixes(file)[0]):
                problems.append(f"--input {file} is a {kind} file: convert it to one of {_FORMATS}")
        found += files
    if problems:
        raise ConfigError(problems)
    return found


def _files_in(folder: str) -> list[str]:
    """Return the files of known formats in a folder and the folders in it, except hidden ones."""
    found, folders = [], [str(Path(folder))]
    while folders:
        parent = folders.pop()
        try:
            with os.scandir(parent) as entries:
                present = {entry.name: entry for entry in entries if not entry.name.startswith(".")}
        except PermissionError:
            log.warning("%s cannot be read: its files are skipped", parent)
            continue
        folders += [entry.path for entry in present.values() if entry.is_dir(follow_symlinks=False)]
        names: Iterable[str] = present
        if {"state.json", "dataset_info.json"} <= present.keys():  # written by save_to_disk of Hugging Face
            saved = json_object(Path(parent, "state.json")).get("_data_files", [])
            names = [file["filename"] for file in saved if file["filename"] in present]
        for name in names:
            # An earlier run writes two .json files beside its .idx: a report, and the tokenizer's digest.
            dataset = name.removesuffix(".json").removesuffix(".tokenizer")
            is_report = name.endswith(".json") and f"{dataset}.idx" in present
            if _suffixes(name)[0] in _KINDS and not is_report and present[name].is_file():
                found.append(present[name].path.removeprefix("./"))
    return sorted(found)


@lru_cache(maxsize=1)
def _suffixes(path: str) -> tuple[str, str]:
    """Return the suffixes of a file's format and of its compression in lower case, each "" if it has none."""
    _, *suffixes = path.rpartition("/")[2].lower().rsplit(".", 2)
    compression = suffixes.pop() if suffixes and suffixes[-1] in _OPENERS else ""
    return suffixes[-1] if suffixes else "", compression


def input_kind(path: str, text_documents: str) -> str:
    """Return the kind of a file's records, by its suffix: "json" lines, table "rows", or text documents."""
    kind = _KINDS.get(_suffixes(path)[0], "json")
    return text_documents if kind == "text" else kind


def is_compressed(path: str) -> bool:
    """Return whether a file is compressed, by its suffix."""
    return _suffixes(path)[1] != ""


def read_records(
    path: str, json_keys: Sequence[str], text_documents: str, max_bytes: int = MAX_DOCUMENT_BYTES
) -> Iterator[DocumentRecord]:
    """Yield the records of one file in order, with one in memory at a time.

    Args:
        path: path of the file; its suffix gives its kind.
        json_keys: columns to read from a table.
        text_documents: unit that is one document of a .txt file: "file", "line" or "paragraph".
        max_bytes: a longer record is skipped and yielded as a bad record.

    Raises:
        UserError: the file cannot be read, or is truncated or damaged.
    """
    kind = input_kind(path, text_documents)
    if kind == "rows":
        for number, row in enumerate(read_rows(path, json_keys), 1):
            yield DocumentRecord(path, number, "row", row)
        return
    with open_input(path) as (stream, _):
        yield from read_stream(path, kind, stream, max_bytes)


def read_stream(
    source: str, kind: str, stream: BinaryIO, max_bytes: int = MAX_DOCUMENT_BYTES
) -> Iterator[DocumentRecord]:
    """Yield the records of an open file of this `input_kind`; see `read_documents` for the arguments."""
    return _STREAM_READERS[kind](source, stream, max_bytes)


@contextmanager
def open_input(path: str) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open a file: yield its decompressed bytes, and the file, whose position shows the progress.

    Raises:
        UserError: the file cannot be opened, or reading it in the block fails.
    """
    opener = _OPENERS.get(_suffixes(path)[1])
    try:
        with open_file(path) as raw:
            if opener is None:
                yield raw, raw
            else:
                with cast(BinaryIO, opener(raw)) as stream:
                    yield stream, raw
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def open_file(path: str) -> BinaryIO:
    """Open a file of this machine, or of object storage, for reading; a small one is read at once."""
    if not is_remote(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            data = os.read(descriptor, _SMALL_BYTES)
        finally:
            os.close(descriptor)
        return io.BytesIO(data) if len(data) < _SMALL_BYTES else open(path, "rb")
    return cast(BinaryIO, io.BufferedReader(ObjectStream(path), _REQUEST_BYTES))


FileState = tuple[int, object]
"""Size of a file in bytes, and what tells its version."""


def file_states(paths: Sequence[str]) -> list[FileState]:
    """Return the state of each file; (0, None) for standard input."""

    def state(path: str) -> FileState:
        if path == STANDARD_INPUT:
            return 0, None
        if is_remote(path):
            found = open_object(path)
            return found.size, found.version
        status = os.stat(path)
        return status.st_size, status.st_mtime_ns

    started = time.monotonic()
    states = [state(path) for path in paths[:_NUM_TIMED]]
    if time.monotonic() - started < _NUM_TIMED * _FAST_SECONDS:
        return states + [state(path) for path in paths[_NUM_TIMED:]]
    with ThreadPoolExecutor(32) as pool:  # a store or a network file system takes a while to answer
        return states + list(pool.map(state, paths[_NUM_TIMED:]))


def parse_records(
    records: Sequence[DocumentRecord], json_keys: Sequence[str]
) -> list[list[bytes] | RecordError]:
    """Return the texts of each record in UTF-8, one for each key, or the reason why it has none.

    The C++ reader parses plain JSON, which is nearly all of a corpus. Python's json module parses the rest.
    """
    lines = [record.data for record in records if record.kind == "json"]
    plain = iter(json_texts(lines, json_keys))
    parsed: list[list[bytes] | RecordError] = []
    for record in records:
        texts = next(plain) if record.kind == "json" else None
        try:
            parsed.append(texts or parse_record(record, json_keys))
        except RecordError as error:
            parsed.append(error)
    return parsed


def parse_record(record: DocumentRecord, json_keys: Sequence[str]) -> list[bytes]:
    """Return the texts of a record in UTF-8, one for each key.

    Raises:
        RecordError: the record is not valid, or lacks a key, or a value is not text.
    """
    if record.kind == "bad":
        raise RecordError(record.data)
    if record.kind == "text":
        return [_checked_utf8(record.data)]
    row = _json_object(record.data) if record.kind == "json" else record.data
    return [encode_utf8(_text_at(row, key)) for key in json_keys]


def parse_object(record: DocumentRecord) -> dict[str, Any]:
    """Return the JSON object of a record.

    Raises:
        RecordError: the record is not a JSON object.
    """
    if record.kind != "json":
        raise RecordError(record.data if record.kind == "bad" else "it is not a JSON object")
    return _json_object(record.data)


def _json_object(data: bytes) -> dict[str, Any]:
    try:
        value = parse_json(data)
    except ValueError as error:
        raise RecordError(f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RecordError("not a JSON object; each line must be one")
    return value


def _text_at(row: dict[str, Any], key: str) -> str:
    """Return the text under a key, or under a dotted path of keys if no key has that name."""
    value: Any = row
    for part in [key] if key in row else key.split("."):
        if not isinstance(value, dict) or part not in value:
            raise RecordError(f"no key {key!r} (it has {', '.join(map(repr, list(row)[:8]))})")
        value = value[part]
    if not isinstance(value, str):
        raise RecordError(f"the value of {key!r} is {type(value).__name__}, not a text")
    return value


def _checked_utf8(data: bytes) -> bytes:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise RecordError(f"not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}") from None
    return data


def encode_utf8(text: str) -> bytes:
    """Encode the text in UTF-8; lone surrogates, which JSON allows but tokenizers refuse, become U+FFFD."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()


_OPENERS: dict[str, Callable[[BinaryIO], Any]] = {
    "gz": gzip.open,
    "bz2": bz2.open,
    "xz": lzma.open,
    "zst": open_zstandard,
}
"""Decompressors of an open file, by suffix."""


def read_line(stream: BinaryIO, max_bytes: int) -> bytes | None:
    """Return the next line, empty at the end; None for a longer line, which is skipped in constant memory."""
    line = stream.readline(max_bytes + 1)
    if len(line) <= max_bytes or line.endswith(b"\n"):
        return line
    while line and not line.endswith(b"\n"):
        line = stream.readline(1 << 20)
    return None


def _lines(stream: BinaryIO, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield the numbered lines without marks, which joined files have anywhere; None for a line too long."""
    number = 1
    while (line := read_line(stream, max_bytes)) != b"":
        yield number, line and line.removeprefix(BOM)
        number += 1


def _too_long(source: str, number: int, max_bytes: int) -> DocumentRecord:
    return DocumentRecord(source, number, "bad", f"longer than the {max_bytes} bytes of --max-document-bytes")


def _read_json_lines(source: str, stream: BinaryIO, max_bytes: int) -> Iterator[DocumentRecord]:
    for number, line in _lines(stream, max_bytes):
        if line is None:
            yield _too_long(source, number, max_bytes)
        elif line.strip():
            yield DocumentRecord(source, number, "json", line)


def _read_text_lines(source: str, stream: BinaryIO, max_bytes: int) -> Iterator[DocumentRecord]:
    for record in _read_json_lines(source, stream, max_bytes):
        text = record.kind == "json"
        yield record._replace(kind="text", data=record.data.rstrip(b"\r\n")) if text else record


def _read_whole(source: str, stream: BinaryIO, max_bytes: int) -> Iterator[DocumentRecord]:
    data = stream.read(max_bytes + 1)
    if len(data) > max_bytes:
        too_long = _too_long(source, 1, max_bytes)
        yield too_long._replace(data=f"{too_long.data}: with --text-documents paragraph it is many documents")
    else:
        yield DocumentRecord(source, 1, "text", data.removeprefix(BOM))


def _read_paragraphs(source: str, stream: BinaryIO, max_bytes: int) -> Iterator[DocumentRecord]:
    """Yield the lines up to a blank line as one record, numbered by its first line."""
    paragraph: list[bytes] = []
    first, size = 0, 0

    def end() -> Iterator[DocumentRecord]:
        if size > max_bytes:
            yield _too_long(source, first, max_bytes)
        elif paragraph:
            yield DocumentRecord(source, first, "text", b"".join(paragraph).rstrip(b"\r\n"))

    for number, line in _lines(stream, max_bytes):
        if line is not None and not line.strip():
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


_STREAM_READERS: dict[str, Callable[[str, BinaryIO, int], Iterator[DocumentRecord]]] = {
    "json": _read_json_lines,
    "file": _read_whole,
    "line": _read_text_lines,
    "paragraph": _read_paragraphs,
}
