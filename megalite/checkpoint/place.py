"""Where elements stand in a full tensor: what makes a saved tensor readable in another layout."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from megalite.optim.part import Part
from megalite.parallel.shard import axis_of
from megalite.topology import Topology

Tensors = Mapping[str, Tensor | Part]
"""What a rank holds, by global name: parts of tensors that have a parameter's shape, and plain ones."""


class Patch(NamedTuple):
    """A rectangle of a matrix.

    Attributes:
        top, left: place in the matrix of its first element.
        values: ``[rows, columns]``.
    """

    top: int
    left: int
    values: Tensor

    def overlap(self, other: Patch) -> Patch:
        """This patch's elements where the other has some too; there may be none."""
        top, left = max(self.top, other.top), max(self.left, other.left)
        bottom = min(self.top + self.values.shape[0], other.top + other.values.shape[0])
        right = min(self.left + self.values.shape[1], other.left + other.values.shape[1])
        rows = slice(top - self.top, max(top, bottom) - self.top)
        columns = slice(left - self.left, max(left, right) - self.left)
        return Patch(top, left, self.values[rows, columns])


class Rectangle(NamedTuple):
    """A stretch of elements that fills a rectangle of a matrix, row after row.

    Attributes:
        top, left: place in the matrix of its first element.
        at: number of that element in the stretch's `Place`.
    """

    top: int
    left: int
    height: int
    width: int
    at: int

    def num_common(self, other: Rectangle, num_columns: int | None = None) -> int:
        """How many elements both have, in the first `num_columns` columns of the matrix if given."""
        height = min(self.top + self.height, other.top + other.height) - max(self.top, other.top)
        right = min(self.left + self.width, other.left + other.width)
        if num_columns is not None:
            right = min(right, num_columns)
        return max(0, height) * max(0, right - max(self.left, other.left))


@dataclass(frozen=True)
class Place:
    """Elements ``[start, end)`` of a flattened slice, and where the slice stands in the full tensor.

    Seen as a matrix, with the dims before `dim` for rows and the others for columns, the slice is some
    columns of the full tensor, and a stretch of its elements is three rectangles at most.

    Attributes:
        full_shape: of the full tensor without its padding, which no layout has in common with another: a
            slice may stand out beyond the end of `dim`.
        dim: along which the slice is cut out.
        offset: index of the slice's first element along `dim`.
        shape: of the slice.
    """

    full_shape: tuple[int, ...]
    dim: int
    offset: int
    shape: tuple[int, ...]
    start: int
    end: int

    @staticmethod
    def of(tensor: Tensor | Part, topology: Topology) -> Place:
        """The place of what this rank holds; a plain tensor is whole on every rank."""
        if isinstance(tensor, Tensor):
            shape = tuple(tensor.shape)
            return Place(shape, 0, 0, shape, 0, tensor.numel())
        spec, axis = tensor.spec, axis_of(tensor.spec, topology)
        dim = spec.shard.dim if spec.shard else 0
        offset = axis.rank * tensor.shape[dim] if axis else 0
        end = tensor.start + tensor.tensor.numel()
        return Place(spec.used_shape, dim, offset, tensor.shape, tensor.start, end)

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> Place:
        """The place that `record` and JSON made this of.

        Raises:
            ValueError: it is no place.
        """
        try:
            fields: dict[str, Any] = {
                key: tuple(value) if isinstance(value, list) else value for key, value in record.items()
            }
            place = Place(**fields)
            numbers = (*place.full_shape, *place.shape, place.dim, place.offset, place.start, place.end)
            is_sound = all(type(number) is int and number >= 0 for number in numbers) and (
                place._others(place.shape) == place._others(place.full_shape)
                and place.dim < len(place.shape)
                and place.start <= place.end <= math.prod(place.shape)
            )
        except (AttributeError, TypeError) as error:
            raise ValueError("its place in the full tensor is damaged") from error
        if not is_sound:
            raise ValueError("its place in the full tensor is damaged")
        return place

    def record(self) -> dict[str, Any]:
        """The place for JSON."""
        return dict(vars(self))

    @property
    def num_columns(self) -> int:
        """Columns of the full tensor without padding."""
        return math.prod(self.full_shape[self.dim :])

    def rectangles(self) -> Iterator[Rectangle]:
        """Its elements in the full tensor's matrix, in order."""
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
        """The elements, ``[end - start]``, as rectangles of the full tensor's matrix: views."""
        for top, left, height, width, at in self.rectangles():
            yield Patch(top, left, elements[at : at + height * width].view(height, width))

    @property
    def num_used(self) -> int:
        """Its elements that are no padding."""
        return self.num_common(self)

    def num_common(self, other: Place, *, with_padding: bool = False) -> int:
        """How many elements it has in common with another place in the same tensor."""
        columns = None if with_padding else self.num_columns
        return sum(mine.num_common(its, columns) for mine in self.rectangles() for its in other.rectangles())

    def _others(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes of all dims that the slice is not cut along."""
        return (*shape[: self.dim], *shape[self.dim + 1 :])


def are_disjoint(places: Iterable[Place]) -> bool:
    """Whether distinct places in one tensor surely share no element.

    Slices that overlap count as not disjoint, whichever of their elements are there: no layout has such.
    """
    ordered = sorted(places, key=lambda place: (place.offset, place.shape, place.start, place.end))
    for one, next_one in itertools.pairwise(ordered):
        if (one.offset, one.shape) == (next_one.offset, next_one.shape):
            if next_one.start < one.end:
                return False
        elif next_one.offset < one.offset + one.shape[one.dim]:
            return False
    return True
