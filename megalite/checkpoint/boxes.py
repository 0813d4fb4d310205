"""Stretches of a flattened tensor as boxes: what programs that know no stretches can take."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from megalite.checkpoint.place import Place


class Box(NamedTuple):
    """A box of a full tensor whose elements follow each other in a piece of it.

    Attributes:
        offsets: indices of its first element in the full tensor.
        sizes: along each dim, without padding.
        at: number of its first element in the piece.
        shape: along each dim as it lies in the piece: with padding.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at: int
    shape: tuple[int, ...]


def boxes_of(place: Place) -> Iterator[Box]:
    """The boxes that make up a piece, in order of their elements; none for what is padding alone.

    A tensor of n dims needs 2n - 1 at the most.
    """
    for offsets, shape, at in _stretch(place.shape, place.start, place.end):
        cut = (*offsets[: place.dim], offsets[place.dim] + place.offset, *offsets[place.dim + 1 :])
        sizes = tuple(
            min(size, full - offset) for size, full, offset in zip(shape, place.full_shape, cut, strict=True)
        )
        if min(sizes) > 0:
            yield Box(cut, sizes, at - place.start, shape)


def _stretch(
    shape: tuple[int, ...], start: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Offsets, shape and first element of the boxes that are elements ``[start, end)`` of a tensor."""
    if start >= end:
        return
    if len(shape) == 1:
        yield (start,), (end - start,), start
        return
    inner = math.prod(shape[1:])
    first_whole, last_whole = -(-start // inner), end // inner
    if first_whole > last_whole:  # within one row
        yield from _row(shape, last_whole, start, end)
        return
    yield from _row(shape, first_whole - 1, start, first_whole * inner)
    if first_whole < last_whole:
        zeros = (0,) * (len(shape) - 1)
        yield (first_whole, *zeros), (last_whole - first_whole, *shape[1:]), first_whole * inner
    yield from _row(shape, last_whole, last_whole * inner, end)


def _row(
    shape: tuple[int, ...], row: int, start: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """The boxes of elements ``[start, end)`` that lie in one index of dim 0."""
    base = row * math.prod(shape[1:])
    for offsets, sizes, at in _stretch(shape[1:], start - base, end - base):
        yield (row, *offsets), (1, *sizes), at + base
