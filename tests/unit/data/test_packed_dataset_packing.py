"""Best-fit packing: no item is lost, no sample overflows, and few samples have gaps."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.data.packed_dataset import pack_best_fit


def _samples(lengths: list[int], size: int) -> list[list[int]]:
    packing = pack_best_fit(np.array(lengths, np.int64), size)
    bounds = packing.bounds.tolist()
    return [packing.items[a:b].tolist() for a, b in itertools.pairwise(bounds)]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([], []),
        ([5], [[0]]),
        ([4, 6, 3, 7], [[2, 3], [0, 1]]),  # 7 + 3 and 6 + 4, without a gap
        ([10, 10], [[0], [1]]),
        ([6, 7, 3], [[1, 2], [0]]),  # 3 goes beside 7, the fuller one, not beside 6
        ([2, 2, 2, 2, 2, 2], [[0, 1, 2, 3, 4], [5]]),
    ],
)
def test_examples(lengths: list[int], expected: list[list[int]]) -> None:
    assert [sorted(sample) for sample in _samples(lengths, 10)] == expected


@given(st.lists(st.integers(1, 50), max_size=60))
def test_packing_is_a_partition_without_overflow(lengths: list[int]) -> None:
    samples = _samples(lengths, 50)
    assert sorted(item for sample in samples for item in sample) == list(range(len(lengths)))
    sizes = [sum(lengths[item] for item in sample) for sample in samples]
    assert all(0 < size <= 50 for size in sizes)
    # Two samples that fit into one would be one, so at most one is half empty.
    assert sum(2 * size <= 50 for size in sizes) <= 1


def test_a_million_positions_are_nearly_filled() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 20_000)
    assert len(pack_best_fit(lengths, 4096).bounds) - 1 <= 1.002 * lengths.sum() / 4096 + 1
