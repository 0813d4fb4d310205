"""Locate elements in a full tensor, so that another layout can read a saved tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from megalite.distributed.topology import Topology
from megalite.optim.flat_buffers import ParameterShard
from megalite.tensor_parallel.parameter_spec import axis_of

Tensors = Mapping[str, Tensor | ParameterShard]
"""The tensors of a rank by global name: shards of parameter-shaped tensors, and plain tensors."""


class Patch(NamedTuple):
    """Holds a rectangle of a matrix.

    Attributes:
        top, left: position of its first element in the matrix.
        values: ``[rows, columns]``.
    """

    top: int
    left: int
    values: Tensor

    def overlap(self, other: Patch) -> Patch:
        """Return the elements of this patch that the other patch also has; the result can be empty."""
        top, left = max(self.top, other.top), max(self.left, other.left)
        bottom = min(self.top + self.values.shape[0], other.top + other.values.shape[0])
        right = min(self.left + self.values.shape[1], other.left + other.values.shape[1])
        rows = slice(top - self.top, max(top, bottom) - self.top)
        columns = slice(left - self.left, max(left, right) - self.left)
        return Patch(top, left, self.values[rows, columns])


class Rectangle(NamedTuple):
    """Locates consecutive elements of a flattened slice that fill a rectangle of a matrix, row by row.

    Attributes:
        top, left: position of the first element in the matrix.
        at: number of this element in the `ParameterRange`.
    """

    top: int
    left: int
    height: int
    width: int
    at: int

    def num_common(self, other: Rectangle, num_columns: int | None = None) -> int:
        """Return the number of common elements, within the first `num_columns` columns if set."""
        height = min(self.top + self.height, other.top + other.height) - max(self.top, other.top)
        right = min(self.left + self.width, other.left + other.width)
        if num_columns is not None:
            right = min(right, num_columns)
        return max(0, height) * max(0, right - max(self.left, other.left))


@dataclass(frozen=True)
class ParameterRange:
    """Locates elements ``[start, end)`` of a flattened slice, and the slice in the full tensor.

    If the tensor is seen as a matrix, with the dims before `dim` as rows and the others as columns, the slice
    is a range of columns, and a range of its elements consists of at most three rectangles.

    Attributes:
        full_shape: shape of the full tensor without padding. Padding depends on the layout, so a slice can
            extend beyond the end of `dim`.
        dim: dim along which the slice is cut.
        offset: index of the first element of the slice along `dim`.
        shape: shape of the slice.
    """

    full_shape: tuple[int, ...]
    dim: int
    offset: int
    shape: tuple[int, ...]
    start: int
    end: int

    @staticmethod
    def of(tensor: Tensor | ParameterShard, topology: Topology) -> ParameterRange:
        """Return the range that this rank holds; a plain tensor is replicated on every rank."""
        if isinstance(tensor, Tensor):
            shape = tuple(tensor.shape)
            return ParameterRange(shape, 0, 0, shape, 0, tensor.numel())
        spec, axis = tensor.spec, axis_of(tensor.spec, topology)
        dim = spec.shard.dim if spec.shard else 0
        offset = axis.rank * tensor.shape[dim] if axis else 0
        end = tensor.start + tensor.tensor.numel()
        return ParameterRange(spec.used_shape, dim, offset, tensor.shape, tensor.start, end)

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> ParameterRange:
        """Return the range of a record from JSON; the inverse of `record`.

        Raises:
            ValueError: the record is malformed.
        """
        try:
            fields: dict[str, Any] = {
                key: tuple(value) if isinstance(value, list) else value for key, value in record.items()
            }
            found = ParameterRange(**fields)
            numbers = (*found.full_shape, *found.shape, found.dim, found.offset, found.start, found.end)
            is_sound = all(type(number) is int and number >= 0 for number in numbers) and (
                found._other_dims(found.shape) == found._other_dims(found.full_shape)
                and found.dim < len(found.shape)
                and found.start <= found.end <= math.prod(found.shape)
            )
        except (AttributeError, TypeError) as error:
            raise ValueError("its position in the full tensor is damaged") from error
        if not is_sound:
            raise ValueError("its position in the full tensor is damaged")
        return found

    def record(self) -> dict[str, Any]:
        """Return the range for JSON."""
        return dict(vars(self))

    @property
    def num_columns(self) -> int:
        """Return the number of columns of the full tensor without padding."""
        return math.prod(self.full_shape[self.dim :])

    def rectangles(self) -> Iterator[Rectangle]:
        """Yield the rectangles of its elements in the full tensor's matrix, in order."""
        width = math.prod(self.shape[self.dim :])
        left = self.offset * math.prod(self.shape[self.dim + 1 :])
        at = self.start
        while at < self.end:
            row, column = divmod(at, width)
            height = max(1, (self.end - at) // width) if column == 0 else 1
            size = min(height * width - column, self.end - at)
            yield Rectangle(row, left + column, height, size // height, at - self.start)
            at += size

    def patches(self, elements: Tensor) -> Iterator[Patch]:
        """Yield views of the elements, ``[end - start]``, as rectangles of the full tensor's matrix."""
        for top, left, height, width, at in self.rectangles():
            yield Patch(top, left, elements[at : at + height * width].view(height, width))

    @property
    def num_used(self) -> int:
        """Return the number of its elements that are not padding."""
        return self.num_common(self)

    def num_common(self, other: ParameterRange, *, with_padding: bool = False) -> int:
        """Return the number of elements in common with another range of the same tensor."""
        columns = None if with_padding else self.num_columns
        return sum(mine.num_common(its, columns) for mine in self.rectangles() for its in other.rectangles())

    def _other_dims(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the sizes of all dims along which the slice is not cut."""
        return (*shape[: self.dim], *shape[self.dim + 1 :])


def are_disjoint(ranges: Iterable[ParameterRange]) -> bool:
    """Return whether distinct ranges of one tensor share no element.

    Ranges of overlapping slices count as not disjoint, because no layout has such slices.
    """
    ordered = sorted(ranges, key=lambda each: (each.offset, each.shape, each.start, each.end))
    for one, next_one in itertools.pairwise(ordered):
        if (one.offset, one.shape) == (next_one.offset, next_one.shape):
            if next_one.start < one.end:
                return False
        elif next_one.offset < one.offset + one.shape[one.dim]:
            return False
    return True
