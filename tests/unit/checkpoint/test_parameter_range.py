"""Boxes of a full tensor against torch's own indexing."""

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
def places(draw, full_shape=None) -> ParameterRange:
    """A stretch of a box of some tensor."""
    sizes = st.integers(1, 5)
    full_shape = full_shape or tuple(draw(st.lists(sizes, min_size=1, max_size=3)))
    offsets = tuple(draw(st.integers(0, size - 1)) for size in full_shape)
    shape = tuple(
        draw(st.integers(1, size - offset)) for size, offset in zip(full_shape, offsets, strict=True)
    )
    start = draw(st.integers(0, math.prod(shape)))
    return ParameterRange(full_shape, offsets, shape, start, draw(st.integers(start, math.prod(shape))))


@st.composite
def pairs(draw) -> tuple[ParameterRange, ParameterRange]:
    """Two stretches of boxes of the same tensor."""
    first = draw(places())
    return first, draw(places(first.full_shape))


def indices(place: ParameterRange) -> torch.Tensor:
    """What the place says, as torch cuts: numbers of its elements in the flattened full tensor."""
    box = torch.arange(math.prod(place.full_shape)).view(place.full_shape)
    for dim, (offset, size) in enumerate(zip(place.offsets, place.shape, strict=True)):
        box = box.narrow(dim, offset, size)
    return box.flatten()[place.start : place.end]


@given(places())
def test_boxes_are_where_torch_has_the_elements(place: ParameterRange) -> None:
    full = torch.arange(math.prod(place.full_shape)).view(place.full_shape)
    views = list(place.views(indices(place)))
    assert len(views) <= 2 * full.dim() - 1
    assert all(torch.equal(values, box.of(full)) for box, values in views)
    assert sum(box.numel for box, _ in views) == place.num_used == place.end - place.start


@given(pairs())
def test_a_span_has_all_common_elements_and_no_more_at_its_ends(
    both: tuple[ParameterRange, ParameterRange],
) -> None:
    first, second = both
    common = torch.isin(indices(first), indices(second)).nonzero().flatten().tolist()
    assert first.span_of(second) == ((common[0], common[-1] + 1) if common else (0, 0))


@given(pairs())
def test_overlaps_are_the_common_elements(both: tuple[ParameterRange, ParameterRange]) -> None:
    first, second = ([*place.views(indices(place))] for place in both)
    found: list[int] = []
    for one, values in first:
        for other, others in second:
            common = one.common(other)
            assert common == other.common(one)
            assert torch.equal(common.within(one).of(values), common.within(other).of(others))
            found += common.within(one).of(values).flatten().tolist()
    expected = set(indices(both[0]).tolist()) & set(indices(both[1]).tolist())
    assert sorted(found) == sorted(expected)
    assert both[0].num_common(both[1]) == len(expected)


@given(st.data())
def test_places_with_common_elements_are_not_disjoint(data) -> None:
    first = data.draw(places())
    several = [first, *data.draw(st.lists(places(first.full_shape), max_size=3))]
    numbers = [number for place in several for number in indices(place).tolist()]
    if are_disjoint(several):
        assert len(set(numbers)) == len(numbers)


def test_the_boxes_of_a_layout_are_disjoint() -> None:
    boxes = [
        ParameterRange((6, 7), (3 * row, 2 * column), (3, 2), start, end)
        for row in range(2)
        for column in range(4)
        for start, end in ((0, 3), (3, 3), (3, 6))
    ]
    assert are_disjoint(reversed(boxes))
    assert not are_disjoint([*boxes, ParameterRange((6, 7), (3, 2), (3, 2), 2, 4)])
    assert not are_disjoint([*boxes, ParameterRange((6, 7), (3, 3), (3, 2), 0, 6)])
    assert not are_disjoint([*boxes, ParameterRange((6, 7), (2, 2), (3, 2), 0, 6)])


@given(places(), st.integers(0, 3))
def test_boxes_are_the_elements(place: ParameterRange, num_padding: int) -> None:
    """Of a box whose last rows may be padding: each box is some elements in order."""
    numbers = indices(place)
    full = list(place.full_shape)
    full[0] = max(1, full[0] - num_padding)
    boxes = list(boxes_of(dataclasses.replace(place, full_shape=tuple(full))))
    assert len(boxes) <= max(1, 2 * len(full) - 1)
    room = torch.full(place.full_shape, -1)
    for (offsets, sizes), at, shape in boxes:
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
    assert torch.equal(room[: full[0]], expected.view(room.shape)[: full[0]])


@given(places())
def test_a_place_comes_back_from_its_record(place: ParameterRange) -> None:
    assert ParameterRange.from_record(place.record()) == place


def test_padding_is_not_counted() -> None:
    place = ParameterRange((5, 2), (4, 0), (4, 2), 1, 8)  # rows 4 to 8, of which 5 to 8 are padding
    assert place.num_used == 1
    assert place.num_common(place, with_padding=True) == 7


GOOD = ParameterRange((4, 6), (0, 2), (4, 2), 1, 7).record()


@pytest.mark.parametrize(
    "damage",
    [
        *({"offsets": [0, -1]}, {"offsets": [0]}, {"offsets": 3}, {"start": 8}, {"end": 9}),
        *({"dim": 2, "offset": 0}, {"dim": 0}, {"dim": -1, "offset": 0}, {"dim": "0", "offset": 0}),
        *({"shape": [4]}, {"shape": 3}, {"shape": ["4", "2"]}, {"start": None}, {"more": 1}),
    ],
    ids=str,
)
def test_a_damaged_record_is_reported(damage) -> None:
    assert ParameterRange.from_record(GOOD).end == 7
    with pytest.raises(ValueError, match="its position in the full tensor is damaged"):
        ParameterRange.from_record(GOOD | damage)


def test_a_record_of_format_3_has_one_cut_dim() -> None:
    record = {"full_shape": [4, 6], "dim": 1, "offset": 2, "shape": [4, 2], "start": 1, "end": 7}
    assert ParameterRange.from_record(record).record() == GOOD
