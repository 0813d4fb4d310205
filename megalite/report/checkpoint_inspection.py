"""Inspect a checkpoint: its fields, its tensors, and what is damaged."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megalite.checkpoint.convert.hf_folder import CONFIG_FILE, HFFolder
from megalite.checkpoint.convert.source import find_checkpoint, kind_of
from megalite.checkpoint.folder import iterations_in, read_latest
from megalite.checkpoint.full_tensors import FullReader
from megalite.checkpoint.manifest import (
    WRITTEN,
    DamagedCheckpoint,
    damage_of,
    dtype_name,
    read_manifest,
    times_written,
)
from megalite.config import Config
from megalite.report.time_report import format_time
from megalite.utils.commands import command_name
from megalite.utils.errors import UserError
from megalite.utils.log import LineInterval, log

OF_A_RUN = ("progress", "model", "run", "schedule", "settings", "data", "corpora", "tokenizer")
"""Parts of run.json that define the run. The other parts say where and by which versions it was saved."""


_LINE_WIDTH = 100
"""Columns of the report's text."""


class FolderView(Protocol):
    """Folder of tensors to inspect.

    Attributes:
        folder: the folder that holds the files.
        description: the metadata, by part.
    """

    @property
    def folder(self) -> Path: ...

    @property
    def description(self) -> Mapping[str, Any]: ...

    def names(self) -> Sequence[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def files(self, name: str) -> Sequence[str]:
        """Return the names of the files that hold pieces of a tensor."""
        ...

    def tensor(self, name: str) -> Tensor: ...

    def damage(self, verify: bool) -> list[str]:
        """Return the problems, with file names; `verify` reads every byte."""
        ...


class CheckpointView:
    """Checkpoint in megalite's format."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._manifest = read_manifest(folder)
        self._reader = FullReader(self._manifest)
        self.description = self._manifest.description

    def names(self) -> Sequence[str]:
        return self._reader.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._reader.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._reader.dtype(name)

    def files(self, name: str) -> Sequence[str]:
        return sorted({piece.file for piece in self._manifest.tensors[name]})

    def tensor(self, name: str) -> Tensor:
        return self._reader.tensor(name)

    def damage(self, verify: bool) -> list[str]:
        files = self._manifest.files
        absent = [file for file in files if not (self.folder / file).is_file()]
        problems = list[str]()
        for file in with_progress(files if verify else absent, "verified {} of {} files"):
            problems += damage_of(self._manifest, [file])
        for name in self.names():
            try:
                self._reader.pieces(name)
            except DamagedCheckpoint as error:
                problems += error.problems
        return list(dict.fromkeys(problems))


class HFView:
    """Hugging Face folder. It has no digests: the only damage found is a file that cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = HFFolder(folder)
        self.description = {CONFIG_FILE: self._files.config}

    def names(self) -> Sequence[str]:
        return sorted(self._files.files)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._files.tensor(name).dtype

    def files(self, name: str) -> Sequence[str]:
        return [self._files.files[name]]

    def tensor(self, name: str) -> Tensor:
        return self._files.tensor(name)

    def damage(self, verify: bool) -> list[str]:
        problems = list[str]()
        for name in self.names():
            try:
                self._files.tensor(name)
            except UserError as error:
                problems.append(str(error))
        return list(dict.fromkeys(problems))


def open_view(folder: Path, iteration: int | None = None) -> FolderView:
    """Open a Hugging Face folder, or one of a run's checkpoints: `iteration`'s, by default the latest.

    Raises:
        UserError: the folder is neither of them.
        DamagedCheckpoint: the checkpoint's table cannot be read.
    """
    if folder.is_dir() and (folder / CONFIG_FILE).is_file():
        if iteration is not None:
            raise UserError(f"{folder} is a Hugging Face folder: it has no iterations")
        return HFView(folder)
    kind = kind_of(folder)
    if kind != "megalite":
        raise UserError(f"{folder} is a checkpoint of {kind}: convert it first ({command_name('convert')})")
    return CheckpointView(find_checkpoint(folder, iteration))


CHUNK = 1 << 24
"""Number of elements that are converted to double precision at a time."""


@dataclass(frozen=True)
class TensorStatistics:
    """Statistics of a tensor's finite elements, and the number of elements that are not finite."""

    norm: float
    minimum: float
    maximum: float
    num_nan: int
    num_infinite: int

    def __str__(self) -> str:
        text = f"norm {self.norm:.6g}  min {self.minimum:.6g}  max {self.maximum:.6g}"
        strange = ((self.num_nan, "NaN"), (self.num_infinite, "infinite"))
        return text + "".join(f"  {count} {name}" for count, name in strange if count)


@dataclass(frozen=True)
class TensorLine:
    """Tensor in the report.

    Attributes:
        figures: statistics of its elements, if they were requested.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    files: tuple[str, ...]
    figures: TensorStatistics | None = None

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class CheckpointReport:
    """Report on a checkpoint.

    Attributes:
        iterations: iterations of all checkpoints in the run's folder.
        latest: content of the run's `latest` file.
        damage: problems, with the files' names.
    """

    folder: str
    iterations: tuple[int, ...]
    latest: str | None
    description: dict[str, Any]
    tensors: tuple[TensorLine, ...]
    damage: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        """Return the report for JSON; NaN and infinities become strings."""
        record: dict[str, Any] = _jsonable(asdict(self))
        return record


def inspect(view: FolderView, *, verify: bool = False, norms: bool = False) -> CheckpointReport:
    """Inspect every tensor, one at a time.

    Args:
        verify: whether to read every byte and compare it with the digests.
        norms: whether to compute the statistics of every undamaged tensor.
    """
    damage = tuple(view.damage(verify))
    tensors = list[TensorLine]()
    for name in with_progress(view.names(), "read {} of {} tensors"):
        try:
            statistics = statistics_of(view.tensor(name)) if norms else None
            line = TensorLine(
                name, view.shape(name), dtype_name(view.dtype(name)), tuple(view.files(name)), statistics
            )
        except DamagedCheckpoint as error:
            files = _some(tuple(view.files(name)))
            problems = (problem if files in problem else f"{problem} ({files})" for problem in error.problems)
            damage = tuple(dict.fromkeys((*damage, *problems)))
            continue
        tensors.append(line)
    iterations, latest = _beside(view.folder)
    return CheckpointReport(
        str(view.folder), iterations, latest, dict(view.description), tuple(tensors), damage
    )


def with_progress(names: Collection[str], text: str) -> Iterator[str]:
    """Yield the names, and log how many are done in lines that are seconds apart.

    Args:
        text: the line, with places for two numbers.
    """
    interval = LineInterval()
    for done, name in enumerate(names, 1):
        yield name
        if interval.is_over():
            log.info(text.format(done, len(names)))


def lines_of(report: CheckpointReport) -> Iterator[str]:
    """Yield the report as lines of text."""
    yield report.folder
    if report.iterations:
        iterations = ", ".join(map(str, report.iterations))
        yield f"  iterations   {iterations} (latest: {report.latest or 'none is named'})"
    defaults = Config().values()
    for part, value in report.description.items():
        if part == WRITTEN:
            times = times_written(report.description)
            value = {name.replace("_time", ""): format_time(seconds) for name, seconds in times.items()}
        text = _in_line(value)
        if part in OF_A_RUN and isinstance(value, dict):
            changed = {name: v for name, v in value.items() if name not in defaults or v != defaults[name]}
            num_defaults = len(value) - len(changed)
            text = _in_line(changed) + (
                f"; {num_defaults} at their defaults (--json)" if num_defaults else ""
            )
        yield from textwrap.wrap(
            f"{part:<12} {text}",
            _LINE_WIDTH,
            initial_indent="  ",
            subsequent_indent=" " * 15,
            break_on_hyphens=False,
        )
    width = max((len(line.name) for line in report.tensors), default=0)
    for line in report.tensors:
        shape, files = str(list(line.shape)), _some(line.files)
        yield f"  {line.name:<{width}}  {line.dtype:<8} {shape:<16} {line.figures or files}"
    yield from _totals(report)
    yield from (f"damaged: {problem}" for problem in report.damage)


def statistics_of(tensor: Tensor) -> TensorStatistics:
    """Compute a tensor's statistics in double precision, in little more memory than its own."""
    squares, low, high, num_nan, num_infinite = 0.0, math.inf, -math.inf, 0, 0
    for chunk in tensor.reshape(-1).split(CHUNK):
        values = chunk.double()
        is_nan, is_infinite = values.isnan(), values.isinf()
        num_nan += int(is_nan.sum())
        num_infinite += int(is_infinite.sum())
        finite = values[~(is_nan | is_infinite)]
        if finite.numel():
            squares += float(finite.square().sum())
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
    return TensorStatistics(math.sqrt(squares), low, high, num_nan, num_infinite)


_GROUPS = {"optimizer": "optimizer state", "ema": "averages of the weights"}
"""Kinds of tensors besides weights, by the first part of their names."""


def _totals(report: CheckpointReport) -> Iterator[str]:
    groups: dict[str, list[TensorLine]] = {}
    for line in report.tensors:
        group = _GROUPS.get(line.name.partition(".")[0], "weights")
        groups.setdefault(group, []).append(line)
    for group, lines in groups.items():
        elements = sum(line.num_elements for line in lines)
        size = sum(line.num_elements * getattr(torch, line.dtype).itemsize for line in lines)
        yield f"  {group}: {len(lines)} tensors, {elements:,} elements, {size:,} bytes"


def _beside(folder: Path) -> tuple[tuple[int, ...], str | None]:
    """Return the iterations of all checkpoints of the same run, and the content of its `latest` file."""
    iterations = tuple(iterations_in(folder.parent))
    if folder.name not in iterations_in(folder.parent).values():
        return (), None
    try:
        return iterations, read_latest(folder.parent)
    except (OSError, UnicodeDecodeError):
        return iterations, None


def _in_line(value: Any) -> str:
    if isinstance(value, dict):
        present = ((key, item) for key, item in value.items() if item not in (None, "", [], ()))
        return ", ".join(f"{key} {_in_line(item)}" for key, item in present) or "none"
    if isinstance(value, list):
        items = [_in_line(item) for item in value]
        return " ".join(items[:4]) + (f" … ({len(items)})" if len(items) > 4 else "")
    return str(value)


def _some(files: tuple[str, ...]) -> str:
    return ", ".join(files[:2]) + (f" and {len(files) - 2} more" if len(files) > 2 else "")


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
