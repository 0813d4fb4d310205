"""Charts of a report page: their curves, and one Plotly figure with all charts over one x axis.

Figures are dictionaries in Plotly's schema, so that only the page itself needs plotly.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from megalite.report.series import Floats, Series, smooth, thin

COLOURS = ("#2f81e0", "#e8743b", "#19a974", "#c954b0", "#bf9000", "#1797b5", "#8a63e0", "#8490a3")
"""Colours of the runs, readable on a light and a dark page."""
GREY, RED = "#8490a3", "#d92d20"
DASHES = ("solid", "dash", "dot", "dashdot")
_ROW, _GAP, _LINE = 150, 36, 18
"""Pixels of a chart's height, between two charts, and of each line of a title between them."""
_TITLE_WIDTH = 36
"""Characters per line of a title. Plotly does not break lines, and a phone has 270 pixels for them."""
_COLUMNS = 1000
"""Columns of pixels for which `thin` keeps the extremes of a curve: about as many as a chart is wide."""
_MAX_TRIANGLES = 1000
_AXIS = {"gridcolor": "rgba(132,144,163,0.22)", "zeroline": False, "ticks": "outside", "tickcolor": GREY}
_TYPICAL_SHARE = 5.0
"""Largest ratio of the range of all values to the range of the middle 98 % at which a chart shows all."""
_MIN_LOG_RATIO = 1.5
"""Smallest ratio of the largest to the smallest value for which a logarithmic scale is offered."""


@dataclass(frozen=True)
class Curve:
    """Describes a line of a chart.

    Attributes:
        name: shown when hovering.
        run: index of its run, which chooses the colour.
        part: which of the chart's metrics it shows; empty if there is only one.
        dash: index into `DASHES`.
        lost: values that were logged, and then computed again after a restart.
        restarts: x of the first iteration of each restart.
        width: number of points that the smoothed line averages; below 2 there is no smoothed line.
        has_dots: whether to mark each point.
    """

    name: str
    run: int
    series: Series
    part: str = ""
    dash: int = 0
    lost: tuple[Series, ...] = ()
    restarts: tuple[float, ...] = ()
    width: int = 0
    has_dots: bool = False


@dataclass(frozen=True)
class Chart:
    """Holds curves over the x axis that all charts share.

    Attributes:
        unit: unit of y, shown in the title.
        from_zero: whether the y axis begins at 0.
    """

    title: str
    curves: tuple[Curve, ...]
    unit: str = ""
    from_zero: bool = False

    @property
    def values(self) -> Floats:
        """Return every finite y, lost ones too."""
        parts = [part.finite.y for curve in self.curves for part in (curve.series, *curve.lost)]
        return np.concatenate(parts) if parts else np.array([])

    @property
    def num_not_finite(self) -> int:
        return sum(len(curve.series.not_finite) for curve in self.curves)

    @property
    def has_log(self) -> bool:
        """Return whether a logarithmic scale shows more than a linear one."""
        values = self.values
        return bool(values.min() > 0 and values.max() >= _MIN_LOG_RATIO * values.min())

    def axis(self, *, is_log: bool = False) -> dict[str, Any]:
        """Return type and range of the y axis; without a range Plotly shows all values."""
        values = np.log10(self.values) if is_log else self.values
        scale = {"type": "log" if is_log else "linear"}
        low, high = float(values.min()), float(values.max())
        inner_low, inner_high = (float(each) for each in np.percentile(values, (1, 99)))
        inner = inner_high - inner_low
        if inner == 0 or high - low <= _TYPICAL_SHARE * inner:
            return scale | {"autorange": True}
        low, high = max(low, inner_low - inner / 2), min(high, inner_high + inner / 2)
        pad = 0.04 * (high - low)
        starts_at_zero = self.from_zero and not is_log and low >= 0
        return scale | {"range": [0.0 if starts_at_zero else low - pad, high + pad]}

    def note(self) -> str:
        """Describe values outside the linear chart, and its triangles; empty if there are neither."""
        parts, values = [], self.values
        low, high = self.axis().get("range", (values.min(), values.max()))
        if outside := int(((values < low) | (values > high)).sum()):
            farthest = values.max() if values.max() > high else values.min()
            parts.append(f"{outside} of {len(values)} values are outside, up to {short_number(farthest)}")
        if self.num_not_finite:
            parts.append(f"{self.num_not_finite} NaN or infinite (triangles)")
        return "; ".join(parts)


def figure_of(charts: Sequence[Chart], run_names: Sequence[str], x_name: str) -> dict[str, Any]:
    """Stack charts in one Plotly figure: they zoom and hover together.

    All traces use the x axis "x", which is drawn under the lowest chart; the y axes are "y", "y2", "y3", …
    """
    gaps = [_GAP + _LINE * len(_title_lines(chart)) for chart in charts[1:]]
    height = len(charts) * _ROW + sum(gaps)
    layout = base_layout(height + 150, top=90) | {
        "xaxis": {
            **_AXIS,
            **{"title": {"text": x_name}, "anchor": f"y{_suffix(len(charts))}"},
            **{"showspikes": True, "spikemode": "across", "spikethickness": 1, "spikecolor": GREY},
        },
        "hovermode": "x unified",
        # With one run, the box at the pointer has a line for each chart. With several, it would be too long.
        "hoversubplots": "axis" if len(run_names) == 1 else "overlaying",
        "legend": {"orientation": "h", "y": 1 + 34 / height, "yanchor": "bottom"},
        "showlegend": len(run_names) > 1,
        "annotations": [],
    }
    # Add a trace without points for each run: a click on its name in the legend hides the run in all charts.
    empty = {"type": "scatter", "mode": "lines", "x": [None], "y": [None]}
    data = [
        {
            **empty,
            "name": escape(name),
            "legendgroup": str(run),
            "line": {"color": COLOURS[run % len(COLOURS)]},
        }
        for run, name in enumerate(run_names)
    ]
    top = height
    for number, chart in enumerate(charts, 1):
        top -= (_ROW + gaps[number - 2]) if number > 1 else 0
        domain = [(top - _ROW) / height, top / height]
        layout[f"yaxis{_suffix(number)}"] = {
            **_AXIS,
            **chart.axis(),
            "domain": domain,
            "rangemode": "tozero" if chart.from_zero else "normal",
            # "5e-4" for a learning rate, but "20k" for tokens per second.
            "exponentformat": "e" if np.abs(chart.values).max() < 1 else "SI",
        }
        layout["annotations"].append(_title(chart, domain[1]))
        for curve in chart.curves:
            data += [trace | {"yaxis": f"y{_suffix(number)}"} for trace in _traces(curve, chart)]
    layout["shapes"] = _restart_lines(charts)
    layout["updatemenus"] = _scale_buttons(charts)
    return {"data": data, "layout": layout}


def base_layout(height: int, top: int) -> dict[str, Any]:
    """Return the layout that all figures share, in colours for a light and a dark page.

    Args:
        height: height of the figure in pixels, with margins.
        top: height of the upper margin.
    """
    return {
        "template": "none",
        "height": height,
        "margin": {"l": 62, "r": 12, "t": top, "b": 60},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": GREY, "size": 12, "family": "system-ui, sans-serif"},
        "hoverlabel": {"bgcolor": "#ffffff", "bordercolor": GREY, "font": {"color": "#1d2330"}},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": GREY, "activecolor": COLOURS[0]},
    }


def _suffix(number: int) -> str:
    return "" if number == 1 else str(number)


def _title(chart: Chart, top: float) -> dict[str, Any]:
    place = {"xref": "paper", "x": 0, "xanchor": "left", "yref": "paper", "y": top, "yanchor": "bottom"}
    text = "<br>".join(_title_lines(chart))
    return {"text": text, "showarrow": False, "align": "left", "font": {"size": 13}, **place}


def _title_lines(chart: Chart) -> list[str]:
    """Return title and unit, and below them the parts with their line styles, as lines of HTML."""
    title = [f"<b>{escape(line)}</b>" for line in textwrap.wrap(chart.title, _TITLE_WIDTH - len(chart.unit))]
    title[-1] += f" {escape(chart.unit)}"
    parts = {curve.part: DASHES[curve.dash] for curve in chart.curves if curve.part}
    styled = len(parts) > 1
    legend = ", ".join(f"{dash}: {part}" if styled else part for part, dash in parts.items())
    return [*title, *map(escape, textwrap.wrap(legend, _TITLE_WIDTH))]


def _traces(curve: Curve, chart: Chart) -> Iterator[dict[str, Any]]:
    """Yield the lines of a curve: lost values, every value, the smoothed line, and triangles for NaN."""
    name, value = escape(curve.name), "%{y:.7~g}"
    line = {"color": COLOURS[curve.run % len(COLOURS)], "dash": DASHES[curve.dash], "width": 1.8}

    def trace(series: Series, **properties: Any) -> dict[str, Any]:
        shared = {"type": "scatter", "mode": "lines", "legendgroup": str(curve.run), "showlegend": False}
        return {**shared, "name": name, "x": series.x, "y": series.y, **properties}

    lost_line = {"color": GREY, "dash": "dash", "width": 1.2}
    for part in curve.lost:
        yield trace(thin(part, _COLUMNS), name=f"{name}, lost", line=lost_line, hovertemplate=value)
    is_smoothed = curve.width > 1
    style = {"line": {**line, "width": 1}, "opacity": 0.35} if is_smoothed else {"line": line}
    mode = "lines+markers" if curve.has_dots else "lines"
    yield trace(thin(curve.series, _COLUMNS), mode=mode, hovertemplate=value, **style)
    if is_smoothed:
        yield trace(thin(smooth(curve.series, curve.width), _COLUMNS), line=line, hoverinfo="skip")
    not_finite = curve.series.not_finite
    if len(not_finite):
        not_finite = not_finite[:: 1 + len(not_finite) // _MAX_TRIANGLES]
        top = chart.axis().get("range", (0.0, chart.values.max()))[1]
        marker = {"symbol": "triangle-down", "color": RED, "size": 10}
        texts = {"text": [str(each) for each in not_finite.y], "hovertemplate": "%{text}"}
        yield trace(
            Series(not_finite.x, np.full(len(not_finite), top)), mode="markers", marker=marker, **texts
        )


def _restart_lines(charts: Sequence[Chart]) -> list[dict[str, Any]]:
    """Return a dotted line through all charts at each restart of each run."""
    starts = sorted({(curve.run, x) for chart in charts for curve in chart.curves for x in curve.restarts})
    line = {"type": "line", "xref": "x", "yref": "paper", "y0": 0, "y1": 1, "opacity": 0.8}
    return [
        line | {"x0": x, "x1": x, "line": {"color": COLOURS[run % len(COLOURS)], "dash": "dot", "width": 1}}
        for run, x in starts
    ]


def _scale_buttons(charts: Sequence[Chart]) -> list[dict[str, Any]]:
    """Return a switch between linear and logarithmic y axes, for charts where the latter is useful."""
    numbered = [(number, chart) for number, chart in enumerate(charts, 1) if chart.has_log]
    if not numbered:
        return []
    buttons = [
        {
            "label": "log" if is_log else "linear",
            "method": "relayout",
            "args": [
                {
                    f"yaxis{_suffix(number)}.{key}": value
                    for number, chart in numbered
                    for key, value in chart.axis(is_log=is_log).items()
                }
            ],
        }
        for is_log in (False, True)
    ]
    place = {"x": 1, "xanchor": "right", "y": 1, "yanchor": "bottom", "pad": {"b": 4}}
    style = {"type": "buttons", "direction": "right", "bgcolor": "rgba(0,0,0,0)", "bordercolor": GREY}
    return [{"buttons": buttons, **style, **place}]


def short_number(value: float) -> str:
    """Format a number to four digits: `1234`, `123.5k`, `2.5e-5`."""
    size = abs(value)
    if 0 < size < 1e-2:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    for unit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= max(unit, 1e4):
            return f"{value / unit:.4g}{prefix}"
    return f"{value + 0.0:.4g}"  # + 0.0 turns -0 into 0
