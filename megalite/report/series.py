"""Smooth the points of a curve, and thin them without hiding a spike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Series:
    """Holds points with growing x; y may be NaN or infinite."""

    x: Floats
    y: Floats

    @staticmethod
    def of(x: Any, y: Any) -> Series:
        """Make a series from two sequences of numbers of equal length."""
        return Series(np.asarray(x, np.float64), np.asarray(y, np.float64))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: Any) -> Series:
        return Series(self.x[index], self.y[index])

    @property
    def finite(self) -> Series:
        return self[np.isfinite(self.y)]

    @property
    def not_finite(self) -> Series:
        """Return the points whose y is NaN or infinite."""
        return self[~np.isfinite(self.y)]


def smooth(series: Series, width: int) -> Series:
    """Return the mean over the `width` finite points around each point, as many on each side.

    A centred mean does not lag as a running average does. Towards the ends it covers fewer points, but at
    least `width // 8` on each side that has them, so that the ends are less noisy than single points.
    """
    finite = series.finite
    count = len(finite)
    if width < 2 or count < 3:
        return finite
    sums = np.concatenate([[0.0], np.cumsum(finite.y)])
    index = np.arange(count)
    to_nearest_end = np.minimum(index, count - 1 - index)
    half = np.maximum(np.minimum(width // 2, to_nearest_end), width // 8)
    first, end = np.maximum(index - half, 0), np.minimum(index + half + 1, count)
    return Series(finite.x, (sums[end] - sums[first]) / (end - first))


def thin(series: Series, num_columns: int) -> Series:
    """Keep the first, lowest, highest and last finite point in each of `num_columns` parts of the x range.

    A line through them covers the same pixels as a line through all points, as long as the parts are not
    wider than a pixel: the line neither loses nor adds a spike.
    """
    finite = series.finite
    if len(finite) <= 4 * num_columns:
        return finite
    low, high = finite.x[0], finite.x[-1]
    columns = ((finite.x - low) * (num_columns / max(high - low, 1e-300))).astype(np.int64)
    columns = np.clip(columns, 0, num_columns - 1)
    starts = np.flatnonzero(np.diff(columns, prepend=-1))
    kept = set[int]()
    for start, end in zip(starts, [*starts[1:], len(columns)], strict=True):
        part = finite.y[start:end]
        kept.update((int(start), int(start + np.argmin(part)), int(start + np.argmax(part)), int(end) - 1))
    return finite[sorted(kept)]
