"""Read and write the four text files that describe a checkpoint folder.

    run.json      format, versions, progress, model, run and layout: small, for people and for checks
    config.yaml   the config of the run that saved it
    index.json    the pieces of each tensor (which file holds which elements), and the names of all files
    SHA256SUMS    a line for every other file, in the format of `sha256sum -c`

Nothing here is executed or imported, and no name leads out of the folder: an untrusted checkpoint is only
data.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

import megalite
from megalite.checkpoint.folder import NAME
from megalite.checkpoint.parameter_range import ParameterRange
from megalite.checkpoint.progress import TrainingProgress
from megalite.config import Config
from megalite.frontends.command_line import parse
from megalite.utils.errors import ConfigError, UserError
from megalite.utils.files import new_file, open_regular, parse_json, read_regular

FORMAT, OLDEST_FORMAT = 5, 3
"""The format that is written, and the oldest that can be read: its pieces are cut along one dim."""
FIRST_WITH_BUFFERS = 5
"""The first format that holds the model's buffers."""
RUN, CONFIG, INDEX, SUMS = "run.json", "config.yaml", "index.json", "SHA256SUMS"
TEXTS = (RUN, CONFIG, INDEX)
"""The text files that have a digest."""
WRITTEN = "written"
"""Part of run.json with the times at which the checkpoint was begun and complete."""

BLOCK_BYTES = 4 << 20
_MAX_BLOCK_BYTES = 1 << 26
_BLOCKS, _BLOCK_BYTES = "blocks", "block_bytes"
"""Parts of index.json that a checkpoint in object storage has, so that a node can verify what it needs."""
_SUM_LINE = re.compile(r"([0-9a-f]{64})  (.+)")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
_CHUNK_BYTES = 1 << 20
_MAX_BYTES = {RUN: 1 << 24, CONFIG: 1 << 24, SUMS: 1 << 28, INDEX: 1 << 32}
"""Size limits of the text files, far above the largest run's; an untrusted file can have any size."""


class DamagedCheckpoint(UserError):
    """Raised for a folder that is not a complete checkpoint.

    Attributes:
        folder: path or URL of the checkpoint.
        problems: problems, each with the name of the file.
    """

    def __init__(self, folder: Path | str, problems: Sequence[str]) -> None:
        self.folder, self.problems = folder, tuple(problems)
        super().__init__(f"checkpoint {folder} cannot be read ({'; '.join(self.problems)}): load another")

    def __reduce__(self) -> tuple[Callable[..., UserError], tuple[Any, ...]]:
        """Pickle the constructor's arguments, so that the error can be sent to other ranks."""
        return type(self), (self.folder, self.problems)


class OtherFormat(DamagedCheckpoint):
    """Raised for a checkpoint that another version of megalite wrote and this one cannot read."""


@dataclass(frozen=True)
class TensorRecord:
    """One piece of a tensor, as in the index.

    Attributes:
        file: name of the file that holds it under the name of the tensor.
        dtype: torch's name of the dtype, such as ``bfloat16``.
        range: range of its elements in the full tensor; None if the piece is a whole plain tensor.
    """

    file: str
    dtype: str
    range: ParameterRange | None

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> TensorRecord:
        """Return the piece of a record from JSON; the inverse of `record`.

        Raises:
            ValueError: its range is malformed.
        """
        saved = record["place"]
        return TensorRecord(
            record["file"], record["dtype"], None if saved is None else ParameterRange.from_record(saved)
        )

    def record(self) -> dict[str, Any]:
        """Return the piece for JSON."""
        return {"file": self.file, "dtype": self.dtype, "place": self.range and self.range.record()}


@dataclass(frozen=True)
class FileRecord:
    """File that a rank wrote.

    Attributes:
        sha256: hexadecimal digest of the file.
        tensors: its pieces, by tensor name.
        blocks: digests of its blocks of `BLOCK_BYTES`, if parts of the file are to be verified alone.
    """

    name: str
    sha256: str
    tensors: Mapping[str, TensorRecord]
    blocks: Sequence[str] = ()


class TensorBytes(NamedTuple):
    """Bytes of a tensor's piece in a file, from `begin` to `end`, which may be after the last."""

    name: str
    begin: int
    end: int


class FileSource(AbstractContextManager[object], Protocol):
    """Downloader of a checkpoint's tensor files, as a context manager that ends when nobody needs them."""

    def fetch(self, manifest: Manifest, wanted: Mapping[str, Sequence[TensorBytes]]) -> None:
        """Download and verify bytes of the checkpoint's files, unless they are there."""
        ...

    def url_of(self, checkpoint: Path) -> str:
        """Return the URL of a checkpoint's folder."""
        ...


@dataclass(frozen=True)
class Manifest:
    """Text files of a checkpoint, read and verified.

    Attributes:
        description: content of run.json.
        config_text: content of config.yaml.
        tensors: pieces of each tensor, by name.
        digests: SHA-256 of every file except SHA256SUMS, by name.
        blocks: SHA-256 of the blocks of `block_bytes` of tensor files that have such digests, by name.
        download: where the folder's tensor files come from, if the checkpoint is in object storage.
    """

    folder: Path
    description: Mapping[str, Any]
    config_text: str
    tensors: Mapping[str, tuple[TensorRecord, ...]]
    digests: Mapping[str, str]
    blocks: Mapping[str, list[str]] = field(default_factory=dict)
    block_bytes: int = BLOCK_BYTES
    download: FileSource | None = None

    @property
    def title(self) -> str:
        """Return the path of the checkpoint, or its URL if it has been downloaded."""
        return str(self.folder) if self.download is None else self.download.url_of(self.folder)

    @property
    def files(self) -> tuple[str, ...]:
        """Return the names of the tensor files, sorted."""
        return tuple(sorted(self.digests.keys() - set(TEXTS)))


def times_written(description: Any) -> dict[str, float]:
    """Return the times in the part `WRITTEN` of a run.json that may be anything; empty without them."""
    written = description.get(WRITTEN) if isinstance(description, dict) else None
    if not isinstance(written, dict):
        return {}
    return {name: float(time) for name, time in written.items() if isinstance(time, int | float)}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in a `TensorRecord`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype with this name in a `TensorRecord`."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def seal(folder: Path, description: Mapping[str, Any], config_text: str, files: Sequence[FileRecord]) -> None:
    """Write the four text files after all tensor files, and sync each to the disk.

    Args:
        description: content of run.json, to which format and versions are added.

    Raises:
        OSError: the folder cannot be written.
    """
    pieces: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(files, key=lambda file: file.name):
        assert _FILE_NAME.fullmatch(file.name), file.name
        for name, record in file.tensors.items():
            pieces.setdefault(name, []).append(record.record())
    names = sorted(file.name for file in files)
    assert len(set(names)) == len(names), "two writers of one file"
    versions = {"format": FORMAT, "megalite": megalite.__version__, "torch": torch.__version__}
    lines = (f" {json.dumps(name)}: {json.dumps(pieces[name])}" for name in sorted(pieces))
    blocks = {file.name: list(file.blocks) for file in files if file.blocks}
    more = f',\n"{_BLOCK_BYTES}": {BLOCK_BYTES},\n"{_BLOCKS}": {json.dumps(blocks)}' if blocks else ""
    texts = {
        RUN: json.dumps(versions | dict(description), indent=1) + "\n",
        CONFIG: config_text,
        INDEX: '{"tensors": {\n' + ",\n".join(lines) + f'\n}},\n"files": {json.dumps(names)}{more}}}\n',
    }
    digests = {file.name: file.sha256 for file in files}
    digests |= {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    texts[SUMS] = "".join(f"{digests[name]}  {name}\n" for name in sorted(digests))
    for name, text in texts.items():
        with new_file(folder / name) as stream:
            stream.write(text.encode())


def parse_sums(text: str) -> dict[str, str]:
    """Return the digests in a text of SHA256SUMS, by file, without lines that are malformed."""
    return {match[2]: match[1] for match in map(_SUM_LINE.fullmatch, text.splitlines()) if match}


def digests_in(folder: Path) -> dict[str, str]:
    """Return the digests in SHA256SUMS, by file.

    Raises:
        DamagedCheckpoint: the file is missing or malformed.
    """
    reader = _Reader(folder)
    text = reader.text(SUMS)
    digests = parse_sums(text)
    if len(digests) != len(text.splitlines()):
        raise reader.damaged(f"{SUMS} is damaged")
    if missing := [name for name in TEXTS if name not in digests]:
        raise reader.damaged(f"{SUMS} is damaged: it lacks {', '.join(missing)}")
    return digests


def read_manifest(folder: Path) -> Manifest:
    """Read the text files and check their digests, without checking that tensor files exist.

    Raises:
        DamagedCheckpoint: a text file is missing, altered or malformed, or the folder belongs to another
            iteration.
        OtherFormat: an earlier or later version wrote it in another format.
    """
    reader = _Reader(folder)
    digests = reader.digests()
    description, config_text = reader.description(), reader.text(CONFIG)
    tensors, files, blocks, block_bytes = reader.index()
    if unequal := digests.keys() ^ {*files, *TEXTS}:
        raise reader.damaged(f"{SUMS} and {INDEX} differ about {', '.join(sorted(unequal)[:3])}")
    return Manifest(folder, description, config_text, tensors, digests, blocks, block_bytes)


def saved_config(manifest: Manifest) -> Config:
    """Return the config of the run that saved the checkpoint.

    Raises:
        DamagedCheckpoint: it is not valid.
    """
    try:
        config, _ = parse(["--config", str(manifest.folder / CONFIG)])
    except ConfigError as error:
        raise DamagedCheckpoint(manifest.folder, error.problems) from None
    return config


def damage_of(manifest: Manifest, files: Sequence[str]) -> list[str]:
    """Read files completely, and return the problems of files that are missing or have changed."""
    return [problem for name in files if (problem := _damage(manifest.folder / name, manifest.digests[name]))]


def _damage(file: Path, expected: str) -> str | None:
    try:
        if file.lstat().st_size > (limit := _MAX_BYTES.get(file.name, sys.maxsize)):
            return f"{file.name} has more than {limit:,} bytes"
        found = sha256_of(file)
    except FileNotFoundError:
        return f"{file.name} is missing"
    except OSError as error:
        return f"{file.name} cannot be read: {error.strerror}"
    return None if found == expected else f"{file.name} has other contents than {SUMS} says"


def sha256_of(file: Path) -> str:
    """Return the hexadecimal digest of a file, with only one chunk in memory."""
    digest = hashlib.sha256()
    chunk = memoryview(bytearray(_CHUNK_BYTES))
    with open_regular(file) as stream:
        while size := stream.readinto(chunk):  # type: ignore[attr-defined]  # unbuffered: a FileIO
            digest.update(chunk[:size])
    return digest.hexdigest()


class _Reader:
    """Reader of the text files of an untrusted folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def damaged(self, *problems: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(self.folder, problems)

    def digests(self) -> dict[str, str]:
        """Return the digests in SHA256SUMS. A checkpoint without this file may have an older format."""
        if not self.folder.is_dir():
            raise self.damaged("the folder is missing")
        if not (self.folder / SUMS).exists():
            self._check_format(self._json(RUN))
        digests = digests_in(self.folder)
        if problems := list(filter(None, (_damage(self.folder / name, digests[name]) for name in TEXTS))):
            raise self.damaged(*problems)
        return digests

    def text(self, name: str) -> str:
        try:
            return read_regular(self.folder / name, _MAX_BYTES[name]).decode()
        except FileNotFoundError:
            raise self.damaged(f"{name} is missing") from None
        except OSError as error:
            raise self.damaged(f"{name} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise self.damaged(f"{name} is damaged: it is not text") from None

    def description(self) -> dict[str, Any]:
        description = self._json(RUN)
        self._check_format(description)
        parts = ("progress", "model", "run")
        if not all(isinstance(description.get(part), dict) for part in parts):
            raise self.damaged(f"{RUN} is damaged: it lacks {', '.join(parts)}")
        try:
            iteration = TrainingProgress.from_record(description["progress"]).iteration
        except ValueError as error:
            raise self.damaged(str(error)) from None
        name = self.folder.name
        match = NAME.fullmatch(name)
        if match and int(match[1]) != iteration:
            raise self.damaged(f"{RUN} belongs to iteration {iteration}, not to {name}")
        return description

    def index(self) -> tuple[dict[str, tuple[TensorRecord, ...]], frozenset[str], dict[str, list[str]], int]:
        """Return the pieces by tensor, the files, and digests of their blocks, with the size of a block.

        A file is directly in the folder, and not hidden.
        """
        index = self._json(INDEX)
        try:
            files = index["files"]
            if not isinstance(files, list) or not all(
                isinstance(name, str) and _FILE_NAME.fullmatch(name) for name in files
            ):
                raise ValueError("its files are not in this folder")
            known = frozenset(files)
            tensors = {
                name: tuple(_tensor_record(name, piece, known) for piece in pieces)
                for name, pieces in index["tensors"].items()
            }
            if not all(tensors.values()):
                raise ValueError("a tensor has no pieces")
            blocks, block_bytes = index.get(_BLOCKS, {}), index.get(_BLOCK_BYTES, BLOCK_BYTES)
            if (
                not blocks.keys() <= known
                or type(block_bytes) is not int
                or not 0 < block_bytes <= _MAX_BLOCK_BYTES
                or not all(isinstance(digests, list) and digests for digests in blocks.values())
            ):
                raise ValueError("the digests of its blocks are malformed")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise self.damaged(f"{INDEX} is damaged: {error}") from None
        return tensors, known, blocks, block_bytes

    def _check_format(self, description: dict[str, Any]) -> None:
        number = description.get("format")
        if type(number) is not int:
            raise self.damaged(f"{RUN} is not megalite's")
        if not OLDEST_FORMAT <= number <= FORMAT:
            advice = (
                "upgrade megalite to read it"
                if number > FORMAT
                else "only the version of megalite that wrote it can read it"
            )
            readable = f"{OLDEST_FORMAT} to {FORMAT}"
            problem = f"it has format {number}, this version reads {readable}: {advice}"
            raise OtherFormat(self.folder, (problem,))

    def _json(self, name: str) -> dict[str, Any]:
        text = self.text(name)
        try:
            parsed = parse_json(text)
        except ValueError:
            raise self.damaged(f"{name} is damaged: it is not JSON") from None
        if not isinstance(parsed, dict):
            raise self.damaged(f"{name} is not megalite's")
        return parsed


def _tensor_record(name: str, piece: Mapping[str, Any], files: frozenset[str]) -> TensorRecord:
    file, dtype = piece["file"], piece["dtype"]
    if not isinstance(file, str) or file not in files:
        raise ValueError(f"{name} is in {file!r}, which is not one of its files")
    if not isinstance(dtype, str) or not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"{name} has dtype {dtype!r}")
    try:
        return TensorRecord.from_record(piece)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
