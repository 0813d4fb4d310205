"""Blends: their order, their sizes, and the words of --data-path."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data import _index_builder
from megalite.data.blend import BlendedDataset, normalized, num_samples_to_build, parse_data_path
from megalite.utils.errors import UserError
from tests.corpora import Numbers


def test_order() -> None:
    datasets, samples = _index_builder.build_blend_index([0.1, 0.6, 0.3], 20)
    assert datasets.tolist() == [1, 2, 0, 1, 1, 2, 1, 1, 2, 1, 0, 1, 2, 1, 1, 2, 1, 1, 2, 1]
    assert samples.tolist() == [0, 0, 0, 1, 2, 1, 3, 4, 2, 5, 1, 6, 3, 7, 8, 4, 9, 10, 5, 11]
    assert (datasets.dtype, samples.dtype) == (np.int16, np.int64)


def test_hostile_arguments() -> None:
    for weights, n in (([], 3), ([1.0] * 32768, 3), ([1.0], -1), ([1.0], 2**62)):
        with pytest.raises(ValueError, match=r"blend takes|out of range"):
            _index_builder.build_blend_index(weights, n)
    for weight in (float("nan"), float("inf"), -0.1):
        with pytest.raises(ValueError, match="a weight must be finite"):
            _index_builder.build_blend_index([1.0, weight], 3)


@pytest.mark.parametrize("num_datasets", [16, 17, 40, 256, 257, 700])
def test_order_of_many_is_that_of_a_look_at_all(num_datasets: int) -> None:
    """Weights of all sizes, of few sizes that tie, all equal, and with zeros."""
    rng = np.random.default_rng(num_datasets)
    equal = np.ones(num_datasets)
    for raw in (
        rng.lognormal(0, 1.5, num_datasets),
        rng.lognormal(0, 5, num_datasets),
        rng.integers(0, 3, num_datasets),
        np.where(np.arange(num_datasets) == 3, 1e9, 1),
        equal,
    ):
        weights, taken = np.array(normalized(raw.tolist())), np.zeros(num_datasets)
        progress = _index_builder.Progress()
        datasets, samples = _index_builder.build_blend_index(weights.tolist(), 3000, progress)
        assert progress.done == 3000
        for i in range(3000):
            furthest = int(np.argmax(weights * max(i, 1) - taken))
            assert (datasets[i], samples[i]) == (furthest, taken[furthest])
            taken[furthest] += 1


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=8), st.integers(1, 500))
@settings(max_examples=60, deadline=None)
def test_no_dataset_is_drawn_beyond_what_it_is_built_for(weights: list[float], size: int) -> None:
    shares = normalized(weights)
    blend = BlendedDataset(
        [Numbers(d, num_samples_to_build(size, w)) for d, w in enumerate(shares)], weights, size
    )
    drawn = [blend[i].tolist() for i in range(size)]
    for d, share in enumerate(shares):
        mine = [sample for which, sample in drawn if which == d]
        assert mine == list(range(len(mine)))
        assert abs(len(mine) - share * size) < len(weights)
    for outside in (-1, size):
        with pytest.raises(IndexError):
            blend[outside]


@pytest.mark.parametrize(("size", "weight", "built"), [(100, 0.3, 31), (1000, 1 / 3, 336), (1, 0.1, 2)])
def test_datasets_are_built_with_a_surplus(size: int, weight: float, built: int) -> None:
    assert num_samples_to_build(size, weight) == built


@pytest.mark.parametrize(
    ("words", "prefixes", "weights"),
    [
        (["a"], ["a"], None),
        (["a", "b"], ["a", "b"], None),
        (["a", "b", "c"], ["a", "b", "c"], None),
        (["0.3", "a", "7", "b"], ["a", "b"], (0.3, 7.0)),
        ([" 1 ", "a "], ["a"], (1.0,)),
        (["a", "1", "b", "2"], ["a", "1", "b", "2"], None),
    ],
)
def test_data_path(words: list[str], prefixes: list[str], weights: list[float] | None) -> None:
    assert parse_data_path(words) == (prefixes, weights)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "there is no dataset"),
        (["0.5", "a", "b", "c"], "b before a prefix: write a positive weight"),
        (["0", "a", "1", "b"], "0 before a prefix: write a positive weight"),
        (["-1", "a"], "-1 before a prefix: write a positive weight"),
        (["nan", "a"], "nan before a prefix: write a positive weight"),
        (["inf", "a"], "inf before a prefix: write a positive weight"),
        (["0.5", "a", "0.5"], "3 values, an odd number"),
    ],
)
def test_wrong_data_path_is_named(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_data_path(words)
