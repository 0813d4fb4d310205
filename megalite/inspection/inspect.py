"""What a checkpoint holds, in lines for people and in one object for programs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.folder import iterations_in, read_latest
from megalite.checkpoint.manifest import DamagedCheckpoint, dtype_name
from megalite.inspection.view import View

CHUNK = 1 << 24
"""Elements that are widened to double precision at a time."""


@dataclass(frozen=True)
class Figures:
    """What the elements of a tensor are like; NaN and infinities are counted and otherwise left out."""

    norm: float
    minimum: float
    maximum: float
    num_nan: int
    num_infinite: int

    def __str__(self) -> str:
        text = f"norm {self.norm:.6g}  min {self.minimum:.6g}  max {self.maximum:.6g}"
        strange = ((self.num_nan, "NaN"), (self.num_infinite, "infinite"))
        return text + "".join(f"  {count} {what}" for count, what in strange if count)


@dataclass(frozen=True)
class TensorLine:
    """One tensor.

    Attributes:
        figures: where they are asked for.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    files: tuple[str, ...]
    figures: Figures | None = None

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Report:
    """One checkpoint.

    Attributes:
        iterations: of all the checkpoints beside it.
        latest: what the run's folder calls the latest.
        damage: what is wrong, naming the files.
    """

    folder: str
    iterations: tuple[int, ...]
    latest: str | None
    description: dict[str, Any]
    tensors: tuple[TensorLine, ...]
    damage: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        """The report for JSON; what is no number there is a string."""
        record: dict[str, Any] = _jsonable(asdict(self))
        return record


def inspect(view: View, *, verify: bool = False, norms: bool = False) -> Report:
    """Looks at every tensor, one at a time.

    Args:
        verify: read every byte and compare it with the digests.
        norms: read every tensor and compute its figures, unless it is damaged.
    """
    damage = tuple(view.damage(verify))
    tensors = list[TensorLine]()
    for name in view.names():
        try:
            figures = figures_of(view.tensor(name)) if norms else None
            line = TensorLine(
                name, view.shape(name), dtype_name(view.dtype(name)), tuple(view.files(name)), figures
            )
        except DamagedCheckpoint as error:
            files = _some(tuple(view.files(name)))
            problems = (problem if files in problem else f"{problem} ({files})" for problem in error.problems)
            damage = tuple(dict.fromkeys((*damage, *problems)))
            continue
        tensors.append(line)
    iterations, latest = _beside(view.folder)
    return Report(str(view.folder), iterations, latest, dict(view.description), tuple(tensors), damage)


def lines_of(report: Report) -> Iterator[str]:
    """The report for people."""
    yield report.folder
    if report.iterations:
        iterations = ", ".join(map(str, report.iterations))
        yield f"  iterations   {iterations} (latest: {report.latest or 'none is named'})"
    for part, value in report.description.items():
        yield f"  {part:<12} {_in_line(value)}"
    width = max((len(line.name) for line in report.tensors), default=0)
    for line in report.tensors:
        shape, files = str(list(line.shape)), _some(line.files)
        yield f"  {line.name:<{width}}  {line.dtype:<8} {shape:<16} {line.figures or files}"
    yield from _totals(report)
    yield from (f"damaged: {problem}" for problem in report.damage)


def figures_of(tensor: Tensor) -> Figures:
    """The figures of a tensor in double precision, in little more memory than its own."""
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
    return Figures(math.sqrt(squares), low, high, num_nan, num_infinite)


def _totals(report: Report) -> Iterator[str]:
    groups: dict[str, list[TensorLine]] = {}
    for line in report.tensors:
        group = "optimizer state" if line.name.startswith("optimizer.") else "weights"
        groups.setdefault(group, []).append(line)
    for group, lines in groups.items():
        elements = sum(line.num_elements for line in lines)
        size = sum(line.num_elements * _itemsize(line.dtype) for line in lines)
        yield f"  {group}: {len(lines)} tensors, {elements:,} elements, {size:,} bytes"


def _itemsize(dtype: str) -> int:
    found = getattr(torch, dtype)
    assert isinstance(found, torch.dtype)
    return found.itemsize


def _beside(folder: Path) -> tuple[tuple[int, ...], str | None]:
    """Iterations of the checkpoints in the same run's folder, and what its `latest` says."""
    iterations = tuple(iterations_in(folder.parent))
    if folder.name not in iterations_in(folder.parent).values():
        return (), None
    try:
        return iterations, read_latest(folder.parent)
    except (OSError, UnicodeDecodeError):
        return iterations, None


def _in_line(value: Any) -> str:
    if isinstance(value, dict):
        given = ((key, item) for key, item in value.items() if item not in (None, [], ()))
        return ", ".join(f"{key} {_in_line(item)}" for key, item in given) or "none"
    if isinstance(value, list):
        items = [str(item) for item in value]
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
