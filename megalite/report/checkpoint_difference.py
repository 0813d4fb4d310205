"""Compare two checkpoints: fields of the run, and tensors by how much they differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.manifest import WRITTEN, dtype_name
from megalite.report.checkpoint_inspection import CHUNK, OF_A_RUN, FolderView, with_progress


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


def lines_of(comparison: CheckpointComparison) -> Iterator[str]:
    """Yield the comparison as lines of text."""
    yield from map(str, comparison.fields)
    yield from map(str, comparison.tensors)
    verdict = "equal" if comparison.is_equal else "different"
    yield f"{verdict}: {comparison.num_equal} tensors the same, {len(comparison.tensors)} not"


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
    pieces = zip(_bytes(a).split(CHUNK), _bytes(b).split(CHUNK), strict=True)
    return all(torch.equal(*pair) for pair in pieces)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


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
