"""Inspect a checkpoint: its fields, its tensors, and what is damaged; or compare it with another one."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.convert.formats import find_checkpoint, kind_of
from megalite.checkpoint.convert.hf_folder import CONFIG_FILE, HFFolder
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
from megalite.observe.report.time_report import format_time
from megalite.utils.commands import command_name
from megalite.utils.errors import UserError
from megalite.utils.log import LineInterval, log

OF_A_RUN = ("progress", "model", "run", "schedule", "settings", "data", "corpora", "tokenizer")
"""Parts of run.json that define the run. The other parts say where and by which versions it was saved."""


_LINE_WIDTH = 100
"""Columns of the report's text."""


class CheckpointView(FullReader):
    """Checkpoint in megalite's format, to inspect."""

    def __init__(self, folder: Path) -> None:
        super().__init__(read_manifest(folder))
        self.folder = folder
        self.description = self.manifest.description

    def files_of(self, name: str) -> Sequence[str]:
        """Return the names of the files that hold pieces of a tensor."""
        return sorted({piece.file for piece in self.manifest.tensors[name]})

    def damage(self, verify: bool) -> list[str]:
        """Return the problems, with file names; `verify` reads every byte."""
        files = self.manifest.files
        absent = [file for file in files if not (self.folder / file).is_file()]
        problems = list[str]()
        for file in with_progress(files if verify else absent, "verified {} of {} files"):
            problems += damage_of(self.manifest, [file])
        for name in self.names():
            try:
                self.pieces(name)
            except DamagedCheckpoint as error:
                problems += error.problems
        return list(dict.fromkeys(problems))


class HFView(HFFolder):
    """Hugging Face folder, to inspect."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.description = {CONFIG_FILE: self.config}

    def names(self) -> Sequence[str]:
        return sorted(self.files)

    def dtype(self, name: str) -> torch.dtype:
        return self.tensor(name).dtype

    def files_of(self, name: str) -> Sequence[str]:
        return [self.files[name]]

    def damage(self, verify: bool) -> list[str]:
        """Return the problems: tensors that cannot be read, as the folder has no digests."""
        problems = list[str]()
        for name in self.names():
            try:
                self.tensor(name)
            except UserError as error:
                problems.append(str(error))
        return list(dict.fromkeys(problems))


FolderView = CheckpointView | HFView
"""Folder of tensors to inspect, with its metadata by part in `description`."""


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
                name, view.shape(name), dtype_name(view.dtype(name)), tuple(view.files_of(name)), statistics
            )
        except DamagedCheckpoint as error:
            files = _some(tuple(view.files_of(name)))
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


@dataclass(frozen=True)
class FieldDifference:
    """Field of run.json.

    Attributes:
        counts: whether a difference makes the checkpoints unequal; layout and versions do not.
    """

    name: str
    one: Any
    other: Any
    counts: bool

    def __str__(self) -> str:
        note = "" if self.counts else " (makes no difference)"
        return f"{self.name}: {self.one} | {self.other}{note}"


@dataclass(frozen=True)
class TensorDifference:
    """Tensor that differs.

    Attributes:
        what: the reason, if the numbers do not show it.
        largest: largest difference of two elements.
        relative: norm of the difference divided by the norm of the first tensor.
    """

    name: str
    what: str = ""
    largest: float = 0.0
    relative: float = 0.0

    def __str__(self) -> str:
        numbers = f"max |a - b| {self.largest:.3e}, relative norm {self.relative:.3e}"
        return f"{self.name}: {self.what or numbers}"


@dataclass(frozen=True)
class CheckpointComparison:
    """Comparison of two checkpoints.

    Attributes:
        num_equal: number of tensors with the same bits.
    """

    fields: tuple[FieldDifference, ...]
    tensors: tuple[TensorDifference, ...]
    num_equal: int

    @property
    def is_equal(self) -> bool:
        """Return whether a run resumes from both in the same way."""
        return not self.tensors and not any(field.counts for field in self.fields)

    def record(self) -> dict[str, Any]:
        """Return the comparison for JSON."""
        return {"is_equal": self.is_equal, **asdict(self)}

    def lines(self) -> Iterator[str]:
        """Yield the comparison as lines of text."""
        yield from map(str, self.fields)
        yield from map(str, self.tensors)
        verdict = "equal" if self.is_equal else "different"
        yield f"{verdict}: {self.num_equal} tensors the same, {len(self.tensors)} not"


def compare(one: FolderView, other: FolderView) -> CheckpointComparison:
    """Compare two checkpoints by field and by tensor, with two tensors in memory at a time.

    Raises:
        DamagedCheckpoint: a tensor cannot be read.
    """
    tensors = list[TensorDifference]()
    num_equal = 0
    names, others = one.names(), other.names()
    for name in with_progress(sorted({*names, *others}), "compared {} of {} tensors"):
        if name not in names or name not in others:
            tensors.append(TensorDifference(name, f"only in the {'first' if name in names else 'second'}"))
        elif difference := _tensor_difference(name, one, other):
            tensors.append(difference)
        else:
            num_equal += 1
    fields = tuple(_fields(one.description, other.description))
    return CheckpointComparison(fields, tuple(tensors), num_equal)


def _fields(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[FieldDifference]:
    ones, others = dict(_flat(one)), dict(_flat(other))
    for name in dict.fromkeys((*ones, *others)):
        if name.split(".")[0] == WRITTEN:  # these times always differ
            continue
        if ones.get(name) != others.get(name):
            counts = name.split(".")[0] in OF_A_RUN
            yield FieldDifference(name, ones.get(name), others.get(name), counts)


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from _flat(item, f"{prefix}{key}.")
        else:
            yield prefix + key, item


def _tensor_difference(name: str, one: FolderView, other: FolderView) -> TensorDifference | None:
    shapes = one.shape(name), other.shape(name)
    if shapes[0] != shapes[1]:
        return TensorDifference(name, f"shape {list(shapes[0])} | {list(shapes[1])}")
    a, b = one.tensor(name), other.tensor(name)
    if a.dtype == b.dtype and _has_same_bits(a, b):
        return None
    dtypes = "" if a.dtype == b.dtype else f"{dtype_name(a.dtype)} | {dtype_name(b.dtype)}, "
    largest, relative = _distance(a, b)
    what = f"{dtypes}max |a - b| {largest:.3e}, relative norm {relative:.3e}" if dtypes else ""
    return TensorDifference(name, what, largest, relative)


def _has_same_bits(a: Tensor, b: Tensor) -> bool:
    pieces = (tensor.contiguous().view(-1).view(torch.uint8).split(CHUNK) for tensor in (a, b))
    return all(itertools.starmap(torch.equal, zip(*pieces, strict=True)))


def _distance(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Return the largest difference and the difference's relative norm; a difference of NaN is infinite."""
    largest, squares, of_first = 0.0, 0.0, 0.0
    for one, other in zip(a.reshape(-1).split(CHUNK), b.reshape(-1).split(CHUNK), strict=True):
        x, y = one.double(), other.double()
        is_same = (x == y) | (x.isnan() & y.isnan())
        difference = torch.where(is_same, 0.0, (x - y).abs()).nan_to_num(math.inf)
        largest = max(largest, float(difference.max()) if difference.numel() else 0.0)
        squares += float(difference.square().sum())
        of_first += float(x.square().sum())
    relative = math.sqrt(squares / of_first) if of_first > 0 else (math.inf if squares else 0.0)
    return largest, relative
