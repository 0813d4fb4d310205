"""Axes whose ticks are round, inside, and told apart."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.reporting.ticks import Axis, label, labels, linear_ticks, log_ticks, padded, padded_log


@pytest.mark.parametrize(
    ("low", "high", "wanted", "expected"),
    [
        (0.0, 10.0, 5, [0, 2, 4, 6, 8, 10]),
        (4.3, 7.7, 5, [5, 6, 7]),
        (-1.0, 1.0, 4, [-1, -0.5, 0, 0.5, 1]),
        (0.0, 2e-3, 4, [0, 5e-4, 1e-3, 1.5e-3, 2e-3]),
        (99_000.0, 101_000.0, 4, [99_000, 99_500, 100_000, 100_500, 101_000]),
    ],
)
def test_linear(low: float, high: float, wanted: int, expected: list[float]) -> None:
    assert linear_ticks(low, high, wanted) == expected


@pytest.mark.parametrize(
    ("low", "high", "wanted", "expected"),
    [
        (1.0, 1000.0, 5, [1, 10, 100, 1000]),
        (1.0, 100.0, 5, [1, 2, 5, 10, 20, 50, 100]),
        (1e-8, 1e8, 4, [1e-8, 1e-4, 1, 1e4, 1e8]),
        (4.0, 8.0, 4, [4, 5, 6, 7, 8]),
    ],
)
def test_logarithmic(low: float, high: float, wanted: int, expected: list[float]) -> None:
    assert log_ticks(low, high, wanted) == pytest.approx(expected)


positive = st.floats(1e-9, 1e12)


@given(positive, positive, st.integers(2, 12))
def test_ticks_lie_inside_grow_and_are_told_apart(one: float, other: float, wanted: int) -> None:
    low, high = min(one, other), max(one, other)
    if high < low * (1 + 1e-3):
        return
    for ticks in (linear_ticks(low, high, wanted), log_ticks(low, high, wanted)):
        room = 1e-6 * (high - low)
        assert all(low - room <= tick <= high + room for tick in ticks)
        assert ticks == sorted(set(ticks))
        assert len(ticks) <= 3 * wanted + 3
        if low > 0.01 * high:  # further apart small ones may share their four digits with nothing
            assert len(set(labels(ticks))) == len(ticks)


@pytest.mark.parametrize(
    ("ticks", "expected"),
    [
        ([0.0, 5e-4, 1e-3], ["0", "5e-4", "1e-3"]),
        ([4.6, 4.8, 5.0], ["4.6", "4.8", "5.0"]),
        ([0.0, 5_000.0, 10_000.0], ["0", "5k", "10k"]),
        ([1e6, 1.5e6, 2e6], ["1.0M", "1.5M", "2.0M"]),
        ([1.0, 10.0, 100_000.0], ["1", "10", "100k"]),
    ],
)
def test_labels(ticks: list[float], expected: list[str]) -> None:
    assert labels(ticks) == expected


def test_a_number_by_itself() -> None:
    assert [label(each) for each in (0.34567, 1234.0, 123456.0, 2.5e-5)] == [
        "0.3457",
        "1234",
        "123.5k",
        "2.5e-5",
    ]


@pytest.mark.parametrize("is_log", [False, True])
def test_an_axis_puts_its_ends_on_its_ends(is_log: bool) -> None:
    axis = Axis(2.0, 200.0, 220.0, 8.0, is_log)
    assert (axis.place(2.0), axis.place(200.0)) == (220.0, 8.0)
    middle = math.sqrt(400) if is_log else 101.0
    assert axis.place(middle) == pytest.approx(114.0)


def test_a_range_of_no_length_gets_some() -> None:
    assert padded(0.0, 0.0) == (-1.0, 1.0)
    low, high = padded_log(5.0, 5.0)
    assert 0 < low < 5.0 < high
