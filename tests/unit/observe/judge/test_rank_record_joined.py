"""Full tensors from the pieces of ranks."""

from __future__ import annotations

import pytest
import torch

from megalite.observe.judge.program import Piece, part_of
from megalite.observe.judge.rank_record import RankRecord, join, joined
from megalite.utils.errors import UserError

FULL = torch.arange(24.0).view(8, 3)


def _cut(rank: int, num_parts: int) -> Piece:
    """Cut each part of the rows over two ranks, without `Piece.cut`."""
    parts = [part.chunk(2)[rank] for part in FULL.chunk(num_parts)]
    return Piece.cut(torch.cat(parts), 0, rank, 2, num_parts)


@pytest.mark.parametrize("num_parts", [1, 2])
def test_cuts_are_joined_where_they_were(num_parts: int) -> None:
    pieces = [_cut(rank, num_parts) for rank in range(2)]
    full = joined([{"x": piece} for piece in pieces])["x"]
    assert torch.equal(full.value, FULL.double())
    assert full.disagreement == 0.0
    assert all(torch.equal(part_of(FULL, piece), piece.tensor) for piece in pieces)


def test_padding_is_left_out_and_holes_are_refused() -> None:
    positions = torch.tensor([0, 1, 2, -1])
    piece = Piece(torch.tensor([5.0, 6.0, 7.0, 99.0]), (3,), positions)
    assert joined([{"x": piece}])["x"].value.tolist() == [5.0, 6.0, 7.0]
    assert part_of(torch.tensor([1.0, 2.0, 3.0]), piece).tolist() == [1.0, 2.0, 3.0, 0.0]
    hole = Piece(torch.tensor([5.0]), (3,), torch.tensor([1]))
    with pytest.raises(UserError, match="no rank holds 2 of the 3 elements of x"):
        joined([{"x": hole}])


def test_ranks_that_disagree_are_named_with_their_sum() -> None:
    copies = [Piece.whole(torch.tensor([1.0, value])) for value in (2.0, 2.0, 5.0)]
    full = joined([{"x": copy} for copy in copies])["x"]
    assert full.disagreement == 3.0
    assert full.ranks == (0, 2)
    assert full.total is not None
    assert full.total.tolist() == [3.0, 9.0]


def test_a_nan_on_one_rank_is_a_disagreement() -> None:
    full = joined([{"x": Piece.whole(torch.tensor([value]))} for value in (1.0, torch.nan, 1.0)])["x"]
    assert full.disagreement != full.disagreement


def test_the_coarsest_dtype_of_the_weights_is_kept() -> None:
    weights = {"x": Piece.whole(torch.ones(2, dtype=torch.bfloat16)), "n": Piece.whole(torch.ones(2))}
    rank = RankRecord(weights, weights, [], {}, weights, "", [])
    assert join([rank]).eps == 2.0**-7
