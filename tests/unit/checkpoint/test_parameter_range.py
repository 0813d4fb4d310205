"""Rectangles of a full tensor's matrix against torch's own indexing."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalite.checkpoint.dcp import boxes_of
from megalite.checkpoint.parameter_range import ParameterRange, are_disjoint


@st.composite
def places(draw, full_shape=None, dim=None) -> ParameterRange:
    """A stretch of a slice of some tensor."""
    sizes = st.integers(1, 5)
    full_shape = full_shape or tuple(draw(st.lists(sizes, min_size=1, max_size=3)))
    dim = draw(st.integers(0, len(full_shape) - 1)) if dim is None else dim
    offset = draw(st.integers(0, full_shape[dim] - 1))
    shape = list(full_shape)
    shape[dim] = draw(st.integers(1, full_shape[dim] - offset))
    start = draw(st.integers(0, math.prod(shape)))
    return ParameterRange(
        full_shape, dim, offset, tuple(shape), start, draw(st.integers(start, math.prod(shape)))
    )


@st.composite
def pairs(draw) -> tuple[ParameterRange, ParameterRange]:
    """Two stretches of slices of the same tensor."""
    first = draw(places())
    return first, draw(places(first.full_shape, first.dim))


def indices(place: ParameterRange) -> torch.Tensor:
    """What the place says, as torch cuts: numbers of its elements in the flattened full tensor."""
    full = torch.arange(math.prod(place.full_shape)).view(place.full_shape)
    slice_ = full.narrow(place.dim, place.offset, place.shape[place.dim])
    return slice_.flatten()[place.start : place.end]


@given(places())
def test_patches_are_where_torch_has_the_elements(place: ParameterRange) -> None:
    patches = list(place.patches(indices(place)))
    assert len(patches) <= 3
    for top, left, values in patches:
        height, width = values.shape
        rows = torch.arange(top, top + height)[:, None]
        assert torch.equal(values, rows * place.num_columns + torch.arange(left, left + width))
    assert place.num_used == place.end - place.start


@given(pairs())
def test_overlaps_are_the_common_elements(both: tuple[ParameterRange, ParameterRange]) -> None:
    first, second = ([*place.patches(indices(place))] for place in both)
    common = [one.overlap(other).values.flatten() for one in first for other in second]
    expected = set(indices(both[0]).tolist()) & set(indices(both[1]).tolist())
    found = [number for values in common for number in values.tolist()]
    assert sorted(found) == sorted(expected)
    assert both[0].num_common(both[1]) == len(expected)
    for one in first:
        for other in second:
            assert torch.equal(one.overlap(other).values, other.overlap(one).values)


@given(st.data())
def test_places_with_common_elements_are_not_disjoint(data) -> None:
    first = data.draw(places())
    several = [first, *data.draw(st.lists(places(first.full_shape, first.dim), max_size=3))]
    numbers = [number for place in several for number in indices(place).tolist()]
    if are_disjoint(several):
        assert len(set(numbers)) == len(numbers)


def test_the_slices_of_a_layout_are_disjoint() -> None:
    slices = [
        ParameterRange((4, 7), 1, 2 * rank, (4, 2), start, end)
        for rank in range(4)
        for start, end in ((0, 3), (3, 3), (3, 8))
    ]
    assert are_disjoint(reversed(slices))
    assert not are_disjoint([*slices, ParameterRange((4, 7), 1, 2, (4, 2), 2, 4)])
    assert not are_disjoint([*slices, ParameterRange((4, 7), 1, 3, (4, 2), 0, 8)])


@given(places(), st.integers(0, 3))
def test_boxes_are_the_elements(place: ParameterRange, num_padding: int) -> None:
    """Of a slice whose last indices may be padding: each box is some elements in order."""
    numbers = indices(place)
    full = list(place.full_shape)
    full[place.dim] = max(1, full[place.dim] - num_padding)
    boxes = list(boxes_of(dataclasses.replace(place, full_shape=tuple(full))))
    assert len(boxes) <= max(1, 2 * len(full) - 1)
    room = torch.full(place.full_shape, -1)
    for offsets, sizes, at, shape in boxes:
        values = numbers[at : at + math.prod(shape)].view(shape)
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            assert offset + size <= full[dim]
            values = values.narrow(dim, 0, size)
        target = room
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            target = target.narrow(dim, offset, size)
        assert (target == -1).all()
        target.copy_(values)
    expected = torch.full((room.numel(),), -1)
    expected[numbers] = numbers
    unpadded = room.narrow(place.dim, 0, full[place.dim])
    assert torch.equal(unpadded, expected.view(room.shape).narrow(place.dim, 0, full[place.dim]))


@given(places())
def test_a_place_comes_back_from_its_record(place: ParameterRange) -> None:
    assert ParameterRange.from_record(place.record()) == place


def test_padding_is_not_counted() -> None:
    place = ParameterRange((5, 2), 0, 4, (4, 2), 1, 8)  # rows 4 to 8, of which 5 to 8 are padding
    assert place.num_used == 1
    assert place.num_common(place, with_padding=True) == 7


GOOD = ParameterRange((4, 6), 1, 2, (4, 2), 1, 7).record()


@pytest.mark.parametrize(
    "damage",
    [
        *({"dim": 2}, {"dim": 0}, {"offset": -1}, {"start": 8}, {"end": 9}),
        *({"shape": [4]}, {"shape": 3}, {"shape": ["4", "2"]}, {"start": None}, {"more": 1}),
    ],
    ids=str,
)
def test_a_damaged_record_is_reported(damage) -> None:
    assert ParameterRange.from_record(GOOD).end == 7
    with pytest.raises(ValueError, match="its position in the full tensor is damaged"):
        ParameterRange.from_record(GOOD | damage)
