"""Ranks hold every position of a sample once, in slices or in zigzag order."""

from __future__ import annotations

import itertools

import pytest
import torch

from megalite.distributed.axes import Slice
from megalite.distributed.axis import HeldPositions


@pytest.mark.parametrize("is_zigzag", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_ranks_hold_every_position_once(count: int, is_zigzag: bool) -> None:
    whole = torch.arange(24)
    ranks = [HeldPositions(index, count, is_zigzag) for index in range(count)]
    by_rank = torch.cat([rank.take(whole) for rank in ranks])
    assert by_rank.sort().values.equal(whole)
    assert ranks[-1].in_rank_order(whole).equal(by_rank)
    assert ranks[-1].in_position_order(by_rank).equal(whole)
    for rank in ranks:
        runs = rank.ranges(24 // count)
        assert list(itertools.chain(*runs)) == rank.take(whole).tolist()
        cut = [rank.ranges(24 // count, slice(first, first + 3)) for first in range(0, 24 // count, 3)]
        assert list(itertools.chain(*itertools.chain(*cut))) == rank.take(whole).tolist()


def test_zigzag_slices_are_as_far_from_both_ends() -> None:
    assert HeldPositions(1, 3, is_zigzag=True).slices == (Slice(1, 6), Slice(4, 6))
    assert HeldPositions(1, 3, is_zigzag=True).ranges(8) == (range(4, 8), range(16, 20))
    assert HeldPositions(1, 3, is_zigzag=True).ranges(8, slice(2, 6)) == (range(6, 8), range(16, 18))
    assert HeldPositions(1, 3).slices == (Slice(1, 3),)
    assert HeldPositions(0, 1, is_zigzag=True).ranges(8) == (range(8),)


def test_neighbours_hold_the_slices_of_one_rank_of_a_smaller_ring() -> None:
    ranks = [HeldPositions(index, 6, is_zigzag=True) for index in range(6)]
    for first in (0, 2, 4):
        own, other = (ranks[number] for number in (first, first + 1))
        together = {position for rank in (own, other) for run in rank.ranges(8) for position in run}
        assert (
            own.group_positions(2) == other.group_positions(2) == HeldPositions(first // 2, 3, is_zigzag=True)
        )
        assert together == {position for run in own.group_positions(2).ranges(16) for position in run}
