"""A chart as SVG: axes, curves, what was lost, what is not finite; and the points that hovering tells."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from megalite.reporting.series import Floats, Series, smooth, thin
from megalite.reporting.ticks import Axis, label, labels, padded, padded_log

WIDTH, HEIGHT = 600, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 582, 8, 220
_COLUMNS = 2 * (_RIGHT - _LEFT)
"""Columns that a curve is thinned to: two a pixel of the drawing, for screens that show it larger."""
_TYPICAL_SHARE = 5.0
"""A chart shows all values, unless these take more than so many times the range of 98 of 100 of them."""
_MIN_LOG_RATIO = 1.5
"""Between the largest and the smallest value, from which a logarithmic scale is offered."""


@dataclass(frozen=True)
class Curve:
    """One line.

    Attributes:
        name: under the pointer.
        part: which of a chart's figures it is, in the legend; empty where there is but one.
        colour: number of its colour.
        dash: number of its pattern, 0 for a whole line.
        lost: what was logged and then made again after a restart.
        restarts: where a process began anew.
        width: of the smoothing, in points; under 2: none.
        has_dots: its points are few and each is marked.
    """

    name: str
    part: str
    colour: int
    series: Series
    dash: int = 0
    lost: tuple[Series, ...] = ()
    restarts: tuple[float, ...] = ()
    width: int = 0
    has_dots: bool = False

    @property
    def values(self) -> Floats:
        """Every finite y of it."""
        return np.concatenate([part.finite.y for part in (self.series, *self.lost)])


@dataclass(frozen=True)
class Chart:
    """Curves over one x axis.

    Attributes:
        unit: of y, in the title.
        from_zero: the y axis begins at 0.
    """

    title: str
    curves: tuple[Curve, ...]
    x_range: tuple[float, float]
    x_name: str = "iteration"
    unit: str = ""
    from_zero: bool = False

    @property
    def values(self) -> Floats:
        return np.concatenate([curve.values for curve in self.curves])

    @property
    def has_log(self) -> bool:
        """Whether a logarithmic scale shows anything that a linear one does not."""
        values = self.values
        return bool(values.min() > 0 and values.max() >= _MIN_LOG_RATIO * values.min())


def figure(chart: Chart) -> str:
    """The chart as an HTML figure, with a switch between its scales where there are two."""
    scales = [("linear", False), *([("log", True)] if chart.has_log else [])]
    drawings = "".join(_drawing(chart, name, is_log) for name, is_log in scales)
    switch = '<label><input type="checkbox" class="switch"> log</label>' if chart.has_log else ""
    unit = f' <span class="unit">{escape(chart.unit)}</span>' if chart.unit else ""
    points = json.dumps(_points(chart), separators=(",", ":")).replace("<", "\\u003c")
    return (
        f"<figure><figcaption><b>{escape(chart.title)}</b>{unit}{_parts(chart)}{_note(chart)}{switch}</figcaption>"
        f'{drawings}<script type="application/json">{points}</script></figure>'
    )


def _parts(chart: Chart) -> str:
    """A legend of the patterns, where there are several; colours are those of the page's legend."""
    parts = {curve.part: curve.dash for curve in chart.curves}
    if len(parts) < 2:
        return ""
    return "".join(
        f'<span class="part"><svg viewBox="0 0 26 8"><path class="line d{dash}" d="M0 4h26"/></svg>'
        f"{escape(part)}</span>"
        for part, dash in parts.items()
    )


def _note(chart: Chart) -> str:
    """What is not in the picture, and what is not told by its lines."""
    words = []
    values, (low, high) = chart.values, _range(chart, False)
    if outside := int(((values < low) | (values > high)).sum()):
        far = values.max() if values.max() > high else values.min()
        words.append(f"{outside} of {len(values)} values lie outside, as far as {label(far)}")
    if strange := sum(len(curve.series.strange) for curve in chart.curves):
        words.append(f"{strange} NaN or infinite (triangles)")
    return f' <span class="note">{"; ".join(words)}</span>' if words else ""


def _range(chart: Chart, is_log: bool) -> tuple[float, float]:
    values = np.log(chart.values) if is_log else chart.values
    low, high = float(values.min()), float(values.max())
    inner_low, inner_high = (float(each) for each in np.percentile(values, (1, 99)))
    inner = inner_high - inner_low
    if inner > 0 and high - low > _TYPICAL_SHARE * inner:
        low, high = max(low, inner_low - inner / 2), min(high, inner_high + inner / 2)
    if is_log:
        return padded_log(float(np.exp(low)), float(np.exp(high)))
    if chart.from_zero and low >= 0:
        return 0.0, padded(0.0, high)[1]
    return padded(low, high)


def _drawing(chart: Chart, name: str, is_log: bool) -> str:
    x = Axis(*chart.x_range, _LEFT, _RIGHT)
    y = Axis(*_range(chart, is_log), _BOTTOM, _TOP, is_log)
    inner = "".join(part for curve in chart.curves for part in _curve(curve, x, y))
    axes = json.dumps([x.low, x.high, x.start, x.end, y.low, y.high, y.start, y.end, is_log])
    # With room for a dot that stands on the frame; what lies outside is cut off.
    left, top, width, height = _LEFT - 5, _TOP - 4, _RIGHT - _LEFT + 10, _BOTTOM - _TOP + 4
    box = f'x="{left}" y="{top}" width="{width}" height="{height}"'
    return (
        f'<svg class="chart {name}" viewBox="0 0 {WIDTH} {HEIGHT}" data-axes="{axes}" role="img" '
        f'aria-label="{escape(chart.title)}">{"".join(_frame(chart, x, y))}'
        f'<svg {box} viewBox="{left} {top} {width} {height}">{inner}</svg>'
        f'<g class="cursor"></g></svg>'
    )


def _frame(chart: Chart, x: Axis, y: Axis) -> Iterator[str]:
    """Grid, ticks and the name of x."""
    ticks = y.ticks(5)
    for tick, text in zip(ticks, labels(ticks), strict=True):
        place = y.place(tick)
        yield f'<path class="grid" d="M{_LEFT} {place:.1f}H{_RIGHT}"/>'
        yield f'<text class="y" x="{_LEFT - 6}" y="{place + 4:.1f}">{text}</text>'
    ticks = x.ticks(7)
    for tick, text in zip(ticks, labels(ticks), strict=True):
        place = x.place(tick)
        yield f'<path class="tick" d="M{place:.1f} {_BOTTOM}v4"/>'
        yield f'<text class="x" x="{place:.1f}" y="{_BOTTOM + 16}">{text}</text>'
    yield f'<path class="axis" d="M{_LEFT} {_BOTTOM}H{_RIGHT}"/>'
    yield f'<text class="x name" x="{_RIGHT}" y="{_BOTTOM + 28}">{escape(chart.x_name)}</text>'


def _curve(curve: Curve, x: Axis, y: Axis) -> Iterator[str]:
    """Restarts, what was lost, every value, their mean, and what has no place."""
    style = f"c{curve.colour} d{curve.dash}"
    for place in curve.restarts:
        yield f'<path class="restart {style}" d="M{x.place(place):.1f} {y.start}V{y.end}"/>'
    for part in curve.lost:
        yield f'<path class="lost {style}" d="{_path(part, x, y)}"/>'
    is_smoothed = curve.width > 1
    yield f'<path class="{"raw" if is_smoothed else "line"} {style}" d="{_path(curve.series, x, y)}"/>'
    if is_smoothed:
        yield f'<path class="line {style}" d="{_path(smooth(curve.series, curve.width), x, y)}"/>'
    if curve.has_dots:
        for px, py in _pixels(curve.series, x, y):
            yield f'<circle class="{style}" cx="{px:.1f}" cy="{py:.1f}" r="3"/>'
    for value in _places(curve.series.strange, x):
        yield f'<path class="strange" d="M{value:.1f} {y.end + 9}l-5 -8h10z"/>'


def _places(series: Series, x: Axis) -> list[float]:
    """Pixels of points, each but once."""
    return sorted({round(x.place(float(each)) * 2) / 2 for each in series.x})


def _pixels(series: Series, x: Axis, y: Axis) -> Iterator[tuple[float, float]]:
    shown = thin(series, (x.low, x.high), _COLUMNS)
    for value, height in zip(shown.x, shown.y, strict=True):
        yield x.place(float(value)), y.place(float(height))


def _path(series: Series, x: Axis, y: Axis) -> str:
    return (
        "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in _pixels(series, x, y)) if len(series.finite) else ""
    )


def _points(chart: Chart) -> dict[str, Any]:
    """What hovering tells: points that are drawn, each with its own value."""
    curves = []
    for curve in chart.curves:
        parts = [(curve.name, curve.series), *((f"{curve.name}, lost", part) for part in curve.lost)]
        for name, part in parts:
            shown = thin(part, chart.x_range, _COLUMNS)
            curves.append(
                {
                    "name": name,
                    "colour": curve.colour,
                    "x": [int(each) for each in shown.x],
                    "y": [_short(each) for each in shown.y],
                }
            )
    return {"x": chart.x_name, "curves": curves}


def _short(value: float) -> float:
    """To seven digits, and whole where it is."""
    number = float(f"{value:.7g}")
    return int(number) if number.is_integer() else number
