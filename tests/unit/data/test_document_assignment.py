"""Documents are assigned to ranks with as many tokens each, and with balanced attention."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.document_assignment import lengths_of_documents, relative_pairs, slices_of_sample
from megalite.attention.ring import ring_steps
from megalite.data.document_assignment import assign_documents


@pytest.mark.parametrize("mean", [1, 5, 40, 600])
@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_every_token_is_assigned_once(num_ranks: int, mean: int) -> None:
    for seed in range(20):
        lengths = list(lengths_of_documents(24 * num_ranks, mean, seed))
        assignment = assign_documents(lengths, num_ranks)
        held = [assignment.positions_of(rank) for rank in range(num_ranks)]
        assert [len(each) for each in held] == [24] * num_ranks
        assert sorted(itertools.chain(*held)) == list(range(24 * num_ranks))
        assert all(each == sorted(each) for each in held)
        for runs in assignment.ranks:
            for run in runs:
                assert run.document[0] <= run.positions[0] <= run.positions[-1] <= run.document[-1]


@pytest.mark.parametrize("mean", [500, 2000, 8000, 60000])
@pytest.mark.parametrize("num_ranks", [4, 8])
def test_attention_is_balanced_where_slices_of_the_sample_are_not(num_ranks: int, mean: int) -> None:
    cases = [list(lengths_of_documents(65536, mean, seed)) for seed in range(4)]
    assignments = [assign_documents(lengths, num_ranks) for lengths in cases]
    slices = [slices_of_sample(lengths, num_ranks) for lengths in cases]
    for assignment, whole in zip(assignments, slices, strict=True):
        assert sum(assignment.num_pairs) == sum(whole.num_pairs)
    assert max(map(relative_pairs, assignments)) < 1.05
    if mean < 60000:  # longer documents fill the sample
        assert max(map(relative_pairs, slices)) > 1.3


def test_a_sample_of_one_document_is_cut_like_the_sample() -> None:
    assignment = assign_documents([64], 4)
    assert [[run.positions for run in runs] for runs in assignment.ranks] == [
        [range(0, 8), range(56, 64)],
        [range(8, 16), range(48, 56)],
        [range(16, 24), range(40, 48)],
        [range(24, 40)],
    ]


def test_the_picture_of_the_documentation() -> None:
    """A long document is cut over all ranks, short ones stay whole, and slices of the sample are uneven."""
    lengths = [32, 8, 8, 8, 4, 4]
    assignment = assign_documents(lengths, 4)
    by_start = {run.positions.start: rank for rank, runs in enumerate(assignment.ranks) for run in runs}
    assert by_start == {
        **{0: 0, 4: 1, 8: 2, 12: 3, 20: 2, 24: 1, 28: 0},
        **{32: 0, 40: 1, 48: 2, 56: 3, 60: 3},
    }
    assert assignment.num_pairs == [168, 168, 168, 152]
    assert slices_of_sample(lengths, 4).num_pairs == [56, 136, 200, 264]


def test_whole_documents_need_no_messages() -> None:
    """And where one document is cut, only its keys are sent."""
    alone, mixed = assign_documents([6] * 8, 4), assign_documents([32, 8, 8, 8, 4, 4], 4)
    for rank in range(4):
        assert [step.distance for step in ring_steps(alone, rank, None, True)] == [0]
        for step in ring_steps(mixed, rank, None, True)[1:]:
            assert {mixed.ranks[rank][number].document for number in step.sent} <= {range(32)}
