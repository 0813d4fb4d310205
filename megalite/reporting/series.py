"""Curves as points: smoothed, and thinned out without hiding anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Series:
    """Points by growing x; a y may be NaN or infinite."""

    x: Floats
    y: Floats

    @staticmethod
    def of(x: Any, y: Any) -> Series:
        """Of any two sequences of numbers of one length."""
        return Series(np.asarray(x, np.float64), np.asarray(y, np.float64))

    def __len__(self) -> int:
        return len(self.x)

    @property
    def finite(self) -> Series:
        """Without the points that have no place on an axis."""
        return self[np.isfinite(self.y)]

    @property
    def strange(self) -> Series:
        """Those points."""
        return self[~np.isfinite(self.y)]

    def __getitem__(self, which: Any) -> Series:
        return Series(self.x[which], self.y[which])


def smooth(series: Series, width: int) -> Series:
    """Mean over the `width` finite points around each, as many on either side.

    As it is centred it does not lag, as a running average would. Towards the ends it is over fewer points,
    down to a quarter of them, and then over what there is of those: an end is not as noisy as a single point.
    """
    finite = series.finite
    count = len(finite)
    if width < 2 or count < 3:
        return finite
    sums = np.concatenate([[0.0], np.cumsum(finite.y)])
    places = np.arange(count)
    room = np.minimum(places, count - 1 - places)
    half = np.maximum(np.minimum(width // 2, room), width // 8)
    first, end = np.maximum(places - half, 0), np.minimum(places + half + 1, count)
    return Series(finite.x, (sums[end] - sums[first]) / (end - first))


def thin(series: Series, x_range: tuple[float, float], num_columns: int) -> Series:
    """First, lowest, highest and last finite point of each of `num_columns` equal parts of the x range.

    A line through them covers the pixels that one through all points covers: no spike is lost, and none is
    made up.
    """
    finite = series.finite
    if len(finite) <= 4 * num_columns:
        return finite
    low, high = x_range
    columns = ((finite.x - low) * (num_columns / max(high - low, 1e-300))).astype(np.int64)
    columns = np.clip(columns, 0, num_columns - 1)
    starts = np.flatnonzero(np.diff(columns, prepend=-1))
    ends = np.append(starts[1:], len(columns))
    kept = {
        int(place)
        for start, end in zip(starts, ends, strict=True)
        for place in (
            start,
            start + np.argmin(finite.y[start:end]),
            start + np.argmax(finite.y[start:end]),
            end - 1,
        )
    }
    return finite[sorted(kept)]
