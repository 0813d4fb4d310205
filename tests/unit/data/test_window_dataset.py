"""Windows of a corpus: the keyed permutation against plain Python, and samples in epochs shuffled apart."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data._index_builder import permute
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.window_dataset import WindowDataset, round_keys, shuffled_windows
from megalite.utils.errors import UserError


def permuted(number: int, size: int, key: str) -> int:
    """Walk one number through the network, in integers of any size."""
    digest, bits = hashlib.sha512(key.encode()).digest(), max(2, (size - 1).bit_length())
    parts = [bits // 2, bits - bits // 2]  # low, high
    while True:
        halves = [number % 2 ** parts[0], number >> parts[0]]
        for i in range(8):
            x = (halves[1 - i % 2] + int.from_bytes(digest[8 * i : 8 * i + 8], "little")) % 2**64
            for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
                x = (x ^ x >> 33) * factor % 2**64
            halves[i % 2] ^= (x ^ x >> 33) % 2 ** parts[i % 2]
        number = halves[1] << parts[0] | halves[0]
        if number < size:
            return number


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 65, 1000, 10**9, 2**40 + 1])
def test_permutation_is_the_walk_of_one_number(size: int) -> None:
    numbers = np.unique(np.linspace(0, size - 1, 20).astype(np.int64))
    images = permute(numbers, size, round_keys(7, "a", size))
    assert images.tolist() == [permuted(number, size, f"7/a/{size}") for number in numbers.tolist()]


@pytest.mark.parametrize("sizes", [range(1, 301), pytest.param(range(301, 5001), marks=pytest.mark.slow)])
def test_every_number_has_one_place(sizes: range) -> None:
    for size in sizes:
        images = permute(np.arange(size), size, round_keys("key", size))
        assert np.array_equal(np.sort(images), np.arange(size)), size


def excess(counts: np.ndarray, num_free: int) -> float:
    """Return how many standard deviations the chi-square of these counts is above that of even ones."""
    mean = counts.mean()
    return float((((counts - mean) ** 2).sum() / mean - num_free) / (2 * num_free) ** 0.5)


@pytest.mark.parametrize("size", [2, 3, 7, 32, 50])
def test_every_place_is_as_likely_for_every_number(size: int) -> None:
    """Each number is as often at each place; and as often next to each other one (a serial test)."""
    places, pairs = np.zeros((size, size)), np.zeros((size, size))
    for key in range(200 * size):
        order = permute(np.arange(size), size, round_keys(key))
        places[np.arange(size), order] += 1
        pairs[order[:-1], order[1:]] += 1
    apart = pairs[~np.eye(size, dtype=bool)]
    assert excess(places.reshape(-1), (size - 1) ** 2) < 4
    assert size == 2 or excess(apart, len(apart) - 1) < 4


def test_orders_of_different_keys_do_not_correlate() -> None:
    """Neither do a number and its place: correlations are within 4.5 standard deviations of numpy's."""
    size = 10_000
    orders = [permute(np.arange(size), size, round_keys(1, epoch)) for epoch in range(6)]
    matrix = np.corrcoef([np.arange(size), *orders])
    assert np.abs(matrix - np.eye(7)).max() < 4.5 / size**0.5
    steps = np.diff(orders[0])
    expected = np.diff(np.random.default_rng(1).permutation(size))
    assert np.std(steps) == pytest.approx(np.std(expected), rel=0.03)


def shuffled_in_blocks(n: int, num_windows: int, block: int, key: str) -> int:
    """The window at position n of an epoch, in integers of any size."""
    group, place = divmod(n, 256 * block)
    if block > 1:
        size = min(256 * block, num_windows - 256 * block * group)
        n = 256 * block * group + permuted(place, size, f"{key}/{group}")
    if n // block == num_windows // block:
        return n
    return permuted(n // block, num_windows // block, key) * block + n % block


@given(st.integers(1, 10**12), st.integers(1, 5000), st.data())
@settings(deadline=None)
def test_shuffled_windows_are_those_of_one_position(
    num_windows: int, block: int, data: st.DataObject
) -> None:
    positions = data.draw(st.lists(st.integers(0, num_windows - 1), max_size=8))
    windows = shuffled_windows(np.array(positions, np.int64), num_windows, block, "key", 3)
    assert windows.tolist() == [shuffled_in_blocks(n, num_windows, block, "key/3") for n in positions]


@given(st.integers(1, 5000), st.integers(1, 20), st.integers())
@settings(deadline=None)
def test_an_epoch_in_blocks_has_every_window_once_and_a_group_few_blocks(
    n: int, block: int, key: int
) -> None:
    windows = shuffled_windows(np.arange(n), n, block, key)
    assert np.array_equal(np.sort(windows), np.arange(n))
    for first in range(0, n, 256 * block):
        assert len(np.unique(windows[first : first + 256 * block] // block)) <= 256


@pytest.fixture
def corpus(write_dataset: Any) -> IndexedDataset:
    """Tokens counted up from 0, so that a token is its position; document 1 is empty."""
    return IndexedDataset(write_dataset([7, 0, 20, 3, 40, 30]))


def test_an_epoch_has_every_window_once_and_the_next_has_another_order(corpus: IndexedDataset) -> None:
    dataset = WindowDataset(corpus, range(2, 5), 45, 4, seed=1)  # tokens 7 to 69
    assert (dataset.num_windows, len(dataset)) == (15, 45)
    samples = dataset.gather(np.arange(45))
    epochs = samples[:, 0].reshape(3, 15)
    for order in epochs:
        assert sorted(order.tolist()) == list(range(7, 67, 4))
    assert len({tuple(order) for order in epochs.tolist()}) == 3
    assert (samples == samples[:, :1] + np.arange(5)).all()
    assert not np.array_equal(
        samples, WindowDataset(corpus, range(2, 5), 45, 4, seed=2).gather(np.arange(45))
    )


def test_a_longer_run_reads_the_same_samples_first(corpus: IndexedDataset) -> None:
    short, long = (WindowDataset(corpus, range(6), number, 4, seed=1) for number in (30, 1000))
    assert np.array_equal(short.gather(np.arange(30)), long.gather(np.arange(30)))
    for outside in (-1, 30):
        with pytest.raises(IndexError, match=f"sample {outside} of a dataset of 30"):
            short[outside]


def test_spans_are_the_sample_without_empty_sequences(corpus: IndexedDataset) -> None:
    dataset = WindowDataset(corpus, range(6), None, 9, seed=1)
    for index in range(len(dataset)):
        spans = dataset.spans(index)
        assert np.concatenate([tokens for _, _, tokens in spans]).tolist() == dataset[index].tolist()
        for sequence, offset, tokens in spans:
            assert tokens.tolist() == corpus[sequence][offset : offset + len(tokens)].tolist() != []


def test_faults_are_named(corpus: IndexedDataset) -> None:
    with pytest.raises(UserError, match="holds 7 tokens in 2 sequences, fewer than the 9 of one sample"):
        WindowDataset(corpus, range(2), None, 8, seed=1)
    dataset = WindowDataset(corpus, range(6), None, 4, seed=1, vocab_size=80)
    with pytest.raises(UserError, match=r"document 5 of .* has token id 8.*, outside the vocabulary of 80"):
        dataset.gather(np.arange(len(dataset)))


def test_the_first_samples_of_a_run_stay_what_they_are(corpus: IndexedDataset) -> None:
    """Checkpoints rely on it: another order would read samples twice after an update of megalite."""
    dataset = WindowDataset(corpus, range(6), 8, 2, seed=1234)
    assert dataset.windows(np.arange(8)).tolist() == [12, 1, 21, 38, 35, 14, 32, 4]
