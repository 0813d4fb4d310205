"""Locate elements in a full tensor, so that another layout can read a saved tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megalite.distributed.topology import Topology
from megalite.tensor_parallel.parameter_spec import ParameterShard
from megalite.tensor_parallel.placement import Box

Tensors = Mapping[str, Tensor | ParameterShard]
"""The tensors of a rank by global name: shards of parameter-shaped tensors, and plain tensors."""


def elements_of(tensor: Tensor | ParameterShard) -> Tensor:
    """Return the elements that this rank holds, flat."""
    return tensor.tensor if isinstance(tensor, ParameterShard) else tensor.detach().view(-1)


@dataclass(frozen=True)
class ParameterRange:
    """Elements ``[start, end)`` of a flattened box, and the position of the box in the full tensor.

    Attributes:
        full_shape: shape of the full tensor without padding. Padding depends on the layout, so a box can
            extend beyond the end of a dim.
        offsets: index of the first element of the box along each dim.
    """

    full_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    end: int

    @staticmethod
    def whole(shape: tuple[int, ...]) -> ParameterRange:
        """Return the range of a whole tensor."""
        return ParameterRange(shape, (0,) * len(shape), shape, 0, math.prod(shape))

    @staticmethod
    def of(tensor: Tensor | ParameterShard, topology: Topology) -> ParameterRange:
        """Return the range that this rank holds; a plain tensor is replicated on every rank."""
        if isinstance(tensor, Tensor):
            return ParameterRange.whole(tuple(tensor.shape))
        spec, end = tensor.spec, tensor.start + tensor.tensor.numel()
        offsets = spec.box(topology).starts
        return ParameterRange(spec.used_shape, offsets, tensor.shape, tensor.start, end)

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> ParameterRange:
        """Return the range of a record from JSON; the inverse of `record`.

        Records of format 3 have `dim` and `offset` of the only dim that is cut, instead of `offsets`.

        Raises:
            ValueError: the record is malformed.
        """
        try:
            fields: dict[str, Any] = {
                key: tuple(value) if isinstance(value, list) else value for key, value in record.items()
            }
            if "dim" in fields:
                offsets = [0] * len(fields["full_shape"])
                dim = fields.pop("dim")
                if type(dim) is not int or dim < 0:
                    raise TypeError
                offsets[dim] = fields.pop("offset")
                fields["offsets"] = tuple(offsets)
            found = ParameterRange(**fields)
            numbers = (*found.full_shape, *found.offsets, *found.shape, found.start, found.end)
            is_sound = all(type(number) is int and number >= 0 for number in numbers) and (
                len(found.full_shape) == len(found.offsets) == len(found.shape)
                and found.start <= found.end <= math.prod(found.shape)
            )
        except (AttributeError, TypeError, LookupError) as error:
            raise ValueError("its position in the full tensor is damaged") from error
        if not is_sound:
            raise ValueError("its position in the full tensor is damaged")
        return found

    def record(self) -> dict[str, Any]:
        """Return the range for JSON."""
        return dict(vars(self))

    @property
    def full(self) -> Box:
        """Return the full tensor without padding, as a box."""
        return Box((0,) * len(self.full_shape), self.full_shape)

    def boxes(self) -> Iterator[tuple[Box, int]]:
        """Yield boxes of the full tensor that consist of consecutive elements of the range, in order.

        Each comes with the number of its first element in the range. A tensor of n dims needs at most 2n - 1.
        """
        for (starts, shape), at in _boxes(self.shape, self.start, self.end):
            yield Box(tuple(map(int.__add__, starts, self.offsets)), shape), at - self.start

    def views(self, elements: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """Yield the boxes with views of their values in `elements`, ``[end - start]``."""
        for box, at in self.boxes():
            yield box, elements[at : at + box.numel].view(box.shape)

    @property
    def num_used(self) -> int:
        """Return the number of its elements that are not padding."""
        return sum(box.common(self.full).numel for box, _ in self.boxes())

    def num_common(self, other: ParameterRange, *, with_padding: bool = False) -> int:
        """Return the number of elements in common with another range of the same tensor."""
        if not self._bounds.common(other._bounds).numel:
            return 0
        theirs = [box for box, _ in other.boxes()]
        common = (mine.common(its) for mine, _ in self.boxes() for its in theirs)
        return sum((each if with_padding else each.common(self.full)).numel for each in common)

    def span_of(self, other: ParameterRange) -> tuple[int, int]:
        """Return the numbers of its first element that is in the other range, and of the one after the last.

        The ranges are of one tensor; with no element in common, both numbers are 0.
        """
        begin, end = self.end - self.start, 0
        theirs = [box for box, _ in other.boxes()]
        for mine, at in self.boxes():
            for common in filter(lambda box: box.numel, map(mine.common, theirs)):
                first = _number_in(mine, common.starts)
                last = _number_in(mine, tuple(end - 1 for end in common.ends))
                begin, end = min(begin, at + first), max(end, at + last + 1)
        return (begin, end) if end else (0, 0)

    @property
    def _bounds(self) -> Box:
        """Return a box with all elements: the box of the slice, from its first row to its last row."""
        if not self.shape:
            return self.full
        row_size = max(1, math.prod(self.shape[1:]))
        first, end = self.start // row_size, -(-self.end // row_size)
        return Box((self.offsets[0] + first, *self.offsets[1:]), (end - first, *self.shape[1:]))


def _boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[Box, int]]:
    """Yield boxes of elements ``[start, end)`` of a tensor, each with the number of its first element."""
    if start >= end:
        return
    if not shape:
        yield Box((), ()), 0
        return
    row_size = math.prod(shape[1:])
    first_whole, end_whole = -(-start // row_size), end // row_size
    if first_whole > end_whole:  # within one row
        yield from _boxes_of_row(shape, end_whole, start, end)
        return
    yield from _boxes_of_row(shape, first_whole - 1, start, first_whole * row_size)
    if first_whole < end_whole:
        rest = (0,) * (len(shape) - 1)
        yield Box((first_whole, *rest), (end_whole - first_whole, *shape[1:])), first_whole * row_size
    yield from _boxes_of_row(shape, end_whole, end_whole * row_size, end)


def _boxes_of_row(shape: tuple[int, ...], row: int, start: int, end: int) -> Iterator[tuple[Box, int]]:
    """Yield the boxes of elements ``[start, end)`` with the same index of dim 0."""
    base = row * math.prod(shape[1:])
    for (starts, sizes), at in _boxes(shape[1:], start - base, end - base):
        yield Box((row, *starts), (1, *sizes)), at + base


def _number_in(box: Box, index: Sequence[int]) -> int:
    """Return the number of the element of a box with this index in the full tensor."""
    number = 0
    for start, size, at in zip(box.starts, box.shape, index, strict=True):
        number = number * size + at - start
    return number


def are_disjoint(ranges: Iterable[ParameterRange]) -> bool:
    """Return whether distinct ranges of one tensor share no element.

    Ranges of overlapping boxes count as not disjoint, because no layout has such boxes.
    """
    by_box: dict[Box, list[ParameterRange]] = {}
    for each in ranges:
        by_box.setdefault(Box(each.offsets, each.shape), []).append(each)
    for same in by_box.values():
        ordered = sorted(same, key=lambda each: (each.start, each.end))
        if any(following.start < one.end for one, following in itertools.pairwise(ordered)):
            return False
    return _are_apart(list(by_box))


def _are_apart(boxes: Sequence[Box], dim: int = 0) -> bool:
    """Return whether no boxes overlap, if they form a grid from this dim on."""
    if len(boxes) < 2:
        return True
    if dim == len(boxes[0].shape):
        return False
    overlapping: list[list[Box]] = []  # along this dim
    end = -1
    for box in sorted(boxes, key=lambda box: box.starts[dim]):
        if box.starts[dim] >= end:
            overlapping.append([])
        overlapping[-1].append(box)
        end = max(end, box.ends[dim])
    return all(_are_apart(each, dim + 1) for each in overlapping)
