"""Curves that are smoothed without a lag and thinned without hiding a spike."""

from __future__ import annotations

import numpy as np
import pytest

from megalite.report.series import Series, smooth, thin


def test_thinning_keeps_each_parts_extremes_and_makes_none_up() -> None:
    rng = np.random.default_rng(0)
    y = rng.normal(size=100_000)
    y[[777, 31_415]] = 50.0, -60.0
    series = Series.of(np.arange(100_000), y)
    shown = thin(series, 500)
    assert len(shown) <= 4 * 500
    assert {50.0, -60.0} <= set(shown.y)
    assert (y[shown.x.astype(int)] == shown.y).all()
    assert (np.diff(shown.x) > 0).all()
    columns, all_columns = (np.minimum(x * 500 // 99_999, 499).astype(int) for x in (shown.x, series.x))
    for column in range(500):
        drawn, real = shown.y[columns == column], y[all_columns == column]
        assert (drawn.min(), drawn.max(), drawn[0], drawn[-1]) == (real.min(), real.max(), real[0], real[-1])


def test_few_points_stay_as_they_are() -> None:
    series = Series.of([1, 2, 3, 4], [4.0, np.nan, np.inf, 1.0])
    assert thin(series, 500).x.tolist() == [1, 4]
    assert series.not_finite.x.tolist() == [2, 3]


def test_smoothing_is_centred() -> None:
    line = Series.of(range(101), np.arange(101) * 2.0 + 1)
    assert smooth(line, 20).y[2:-2] == pytest.approx(line.y[2:-2])  # a lagging mean would lie below
    step = Series.of(range(101), [0.0] * 50 + [1.0] * 51)
    assert smooth(step, 5).y[46:54] == pytest.approx([0, 0, 0.2, 0.4, 0.6, 0.8, 1, 1])


def test_the_ends_are_smooth_too() -> None:
    zigzag = smooth(Series.of(range(200), [0.0, 1.0] * 100), 80)
    assert np.abs(zigzag.y - 0.5).max() < 0.1


def test_smoothing_passes_over_what_is_not_finite() -> None:
    series = Series.of(range(5), [1.0, np.nan, 1.0, np.inf, 1.0])
    assert smooth(series, 3).y.tolist() == [1.0, 1.0, 1.0]
