"""Draw the tokens of experts by layer over time."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from megalite.report.chart import base_layout
from megalite.report.run_history import HistoryRow

_MAX_STEPS = 40
"""Largest number of iterations that the slider can select."""
_MAX_COLUMNS = 400
"""Largest number of iterations side by side."""
_ROW, _MARGINS = 22, 170
"""Pixels of a layer's height, and of the margins with the slider."""
_LARGEST = 3.0
"""Load, in multiples of the mean, from which on all loads have one colour."""
_COLOURS = [[0.0, "#2f81e0"], [1 / _LARGEST, "#f2f4f8"], [1.0, "#d92d20"]]
"""Blue for no tokens, pale for the mean, red for the largest load."""


def load_figure(rows: Sequence[HistoryRow]) -> dict[str, Any]:
    """Draw each expert's tokens by layer, as multiples of the layer's mean, with a slider over iterations.

    Args:
        rows: rows with loads, at least one.
    """
    shown = _spread(rows, _MAX_STEPS)
    layers = _layers(rows)
    data = [
        _heatmap(
            [_relative(row, layer) for layer in layers],
            layers,
            "%{y}, expert %{x}: %{z:.2f} times the mean<extra></extra>",
        )
        | {"visible": row is shown[-1]}
        for row in shown
    ]
    steps = [
        {
            "method": "restyle",
            "args": ["visible", [row is each for each in shown]],
            "label": str(row.iteration),
        }
        for row in shown
    ]
    layout = _layout(len(layers), "expert")
    layout["sliders"] = [
        {"active": len(shown) - 1, "currentvalue": {"prefix": "iteration "}, "steps": steps, "pad": {"t": 48}}
    ]
    return {"data": data, "layout": layout}


def violation_figure(rows: Sequence[HistoryRow]) -> dict[str, Any]:
    """Draw the largest load of each layer over the iterations, as a multiple of the mean."""
    shown, layers = _spread(rows, _MAX_COLUMNS), _layers(rows)
    values = [
        [1.0 + row.loads[layer].max_violation if layer in row.loads else None for row in shown]
        for layer in layers
    ]
    heatmap = _heatmap(
        values, layers, "%{y}, iteration %{x}: the largest load is %{z:.2f} times the mean<extra></extra>"
    )
    return {
        "data": [heatmap | {"x": [row.iteration for row in shown]}],
        "layout": _layout(len(layers), "iteration"),
    }


def load_summary(row: HistoryRow) -> str:
    """Return a line about the most uneven layer, and about the most certain router."""
    worst = max(row.loads, key=lambda layer: row.loads[layer].max_violation)
    surest = min(row.loads, key=lambda layer: row.loads[layer].entropy)
    return (
        f"iteration {row.iteration}: the largest load is {1.0 + row.loads[worst].max_violation:.2f} times "
        f"the mean, in {worst}; the lowest entropy is {row.loads[surest].entropy:.3f} nats, in {surest}"
    )


def _spread(rows: Sequence[HistoryRow], largest: int) -> list[HistoryRow]:
    """Return at most `largest` of the rows, evenly spread, with the last one."""
    step = -(-len(rows) // largest)
    return list(rows[::-1][::step][::-1])


def _layers(rows: Sequence[HistoryRow]) -> list[str]:
    return list(dict.fromkeys(layer for row in rows for layer in row.loads))


def _relative(row: HistoryRow, layer: str) -> list[float]:
    """Return the tokens of a layer's experts as multiples of their mean."""
    tokens = row.loads[layer].tokens if layer in row.loads else ()
    mean = sum(tokens) / max(1, len(tokens)) or 1.0
    return [count / mean for count in tokens]


def _heatmap(values: Sequence[Sequence[float | None]], layers: Sequence[str], hover: str) -> dict[str, Any]:
    return {
        **{"type": "heatmap", "z": values, "y": [escape(layer) for layer in layers], "hovertemplate": hover},
        **{"zmin": 0.0, "zmax": _LARGEST, "colorscale": _COLOURS},
    }


def _layout(num_layers: int, x_name: str) -> dict[str, Any]:
    return base_layout(_ROW * num_layers + _MARGINS, top=20) | {
        "xaxis": {"title": {"text": x_name}},
        "yaxis": {"type": "category", "autorange": "reversed", "automargin": True},
    }
