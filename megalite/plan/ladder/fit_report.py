"""Fit a ladder, and report the fit as lines, as an object for JSON, and as an HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from megalite.observe.report.page import html_page, html_table
from megalite.observe.report.time_report import Table
from megalite.plan.ladder.finished_runs import FinishedRun
from megalite.plan.ladder.power_law import CONFIDENCE, MIN_RUNS_OF_TWO_TERMS, Estimate, PowerLaw, can_separate
from megalite.plan.ladder.power_law import fit_power_law as fit
from megalite.plan.ladder.sizes import LadderRun, table_lines
from megalite.utils.errors import UserError

_HEADS = ("run", "parameters", "tokens", "FLOPs", "loss", "fit", "difference")
_CURVE_POINTS = 100
_EXTENSION = 2.0
"""Factor by which the curve goes on beyond the smallest and the largest compute."""
_UNDETERMINED = 1e6
"""Ratio of the bounds of an interval from which the text does not show them."""
_BLUE, _ORANGE, _RED, _GREY = "#2f81e0", "#e8743b", "#d92d20", "#8490a3"
"""Colours that are readable on a light and a dark page."""
_AXIS = {"gridcolor": "rgba(132,144,163,0.22)", "ticks": "outside", "tickcolor": _GREY, "type": "log"}


@dataclass(frozen=True)
class LadderFit:
    """Laws that the runs of a ladder follow, and the losses that they predict.

    Attributes:
        by_compute: L(C).
        by_size: L(N, D); None if the runs cannot tell the two apart.
        targets: runs whose losses are predicted.
    """

    runs: tuple[FinishedRun, ...]
    by_compute: PowerLaw
    by_size: PowerLaw | None
    targets: tuple[LadderRun, ...]


def fit_ladder(runs: Sequence[FinishedRun], targets: Sequence[LadderRun]) -> LadderFit:
    """Fit the laws to the runs."""
    losses = [each.loss for each in runs]
    sizes = [(each.run.parameters, each.run.tokens) for each in runs]
    by_size = fit(sizes, losses) if can_separate(*zip(*sizes, strict=True)) else None
    return LadderFit(tuple(runs), fit([(each.run.flops,) for each in runs], losses), by_size, tuple(targets))


def fit_lines(ladder: LadderFit) -> Iterator[str]:
    """Yield the table of the runs, the laws and the predictions."""
    yield from table_lines(_HEADS, _rows(ladder))
    yield ""
    yield from _law_lines(ladder)
    yield from _prediction_lines(ladder)


def fit_record(ladder: LadderFit) -> dict[str, Any]:
    """Return everything as an object for JSON."""
    return {
        "confidence": CONFIDENCE,
        "runs": [{**_run_record(each.run), "loss": each.loss} for each in ladder.runs],
        "loss_by_compute": _law_record(ladder.by_compute),
        "loss_by_size": None if ladder.by_size is None else _law_record(ladder.by_size),
        "predictions": [
            {
                **_run_record(target),
                "by_compute": ladder.by_compute.predict([target.flops])._asdict(),
                "by_size": None
                if ladder.by_size is None
                else ladder.by_size.predict([target.parameters, target.tokens])._asdict(),
            }
            for target in ladder.targets
        ],
    }


def fit_page(ladder: LadderFit, title: str) -> str:
    """Return the page: the plot, the laws and the table.

    Raises:
        UserError: plotly is not installed.
    """
    try:
        from plotly.io import to_html
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError("the plot needs plotly: pip install plotly") from None
    # plotly's default is a button that uploads the figure.
    config = {"responsive": True, "displaylogo": False, "showSendToCloud": False}
    figure = to_html(compute_figure(ladder), config=config, include_plotlyjs=False, full_html=False)
    lines = [*_law_lines(ladder), *_prediction_lines(ladder)]
    return html_page(
        title,
        [
            f"<figure>{figure}</figure>",
            *(f"<p>{escape(line)}</p>" for line in lines),
            html_table(Table("", _HEADS, tuple(_rows(ladder)))),
        ],
        head=f"<script>{get_plotlyjs()}</script>",
    )


def compute_figure(ladder: LadderFit) -> dict[str, Any]:
    """Return a Plotly figure of loss over compute: the runs, the law with its interval, the predictions."""
    measured = [each.run.flops for each in ladder.runs]
    every = [*measured, *(target.flops for target in ladder.targets)]
    xs = np.geomspace(min(every) / _EXTENSION, max(every) * _EXTENSION, _CURVE_POINTS)
    curve = [ladder.by_compute.predict([x]) for x in xs]
    data: list[dict[str, Any]] = []
    if ladder.by_compute.covariance_root is not None:
        band = [each.high for each in curve] + [each.low for each in reversed(curve)]
        data.append(
            {
                "type": "scatter",
                "x": [*xs, *reversed(xs)],
                "y": band,
                "fill": "toself",
                "mode": "none",
                "opacity": 0.3,
                "fillcolor": _BLUE,
                "hoverinfo": "skip",
                "name": f"{CONFIDENCE:.0%} interval of a run",
            }
        )
    line = {"color": _BLUE, "width": 2}
    data.append(_trace("law", list(xs), [each.value for each in curve], mode="lines", line=line))
    names, losses = [each.name for each in ladder.runs], [each.loss for each in ladder.runs]
    marker = {"color": _ORANGE, "size": 10}
    data.append(_trace("runs", measured, losses, mode="markers", marker=marker, text=names))
    if ladder.targets:
        estimates = [ladder.by_compute.predict([target.flops]) for target in ladder.targets]
        data.append(
            _trace(
                "predictions",
                [target.flops for target in ladder.targets],
                [each.value for each in estimates],
                mode="markers",
                marker={"color": _RED, "size": 10, "symbol": "diamond-open"},
                text=[target.name for target in ladder.targets],
            )
        )
    # An interval of few runs may be far wider than the losses: the axis shows the curve.
    shown = np.log10([*losses, *(each.value for each in curve)])
    pad = 0.2 * float(np.ptp(shown)) + 1e-3
    layout = {
        "template": "none",
        "height": 520,
        "margin": {"l": 62, "r": 12, "t": 40, "b": 60},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": _GREY, "size": 12, "family": "system-ui, sans-serif"},
        "hoverlabel": {"bgcolor": "#ffffff", "bordercolor": _GREY, "font": {"color": "#1d2330"}},
        "xaxis": {**_AXIS, "title": {"text": "model FLOPs"}, "exponentformat": "power"},
        "yaxis": {
            **_AXIS,
            "title": {"text": "validation loss"},
            "range": [float(shown.min()) - pad, float(shown.max()) + pad],
        },
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
    }
    return {"data": data, "layout": layout}


def _trace(name: str, xs: Sequence[float], ys: Sequence[float], **properties: Any) -> dict[str, Any]:
    hover = ("%{text}: " if "text" in properties else "") + "%{y:.4f} at %{x:.3e} FLOPs"
    shared = {"type": "scatter", "name": name, "hovertemplate": hover + "<extra></extra>"}
    return {**shared, "x": xs, "y": ys, **properties}


def _rows(ladder: LadderFit) -> list[tuple[str, ...]]:
    fitted = [ladder.by_compute.predict([each.run.flops]).value for each in ladder.runs]
    return [
        (
            each.name,
            f"{each.run.parameters:,}",
            f"{each.run.tokens:,}",
            f"{each.run.flops:.2e}",
            f"{each.loss:.4f}",
            f"{value:.4f}",
            f"{each.loss / value - 1:+.2%}",
        )
        for each, value in zip(ladder.runs, fitted, strict=True)
    ]


def _law_lines(ladder: LadderFit) -> Iterator[str]:
    yield _law_line(ladder.by_compute, ("C",))
    if ladder.by_size is not None:
        yield _law_line(ladder.by_size, ("N", "D"))
    else:
        yield (
            f"L(N, D) is not fitted: it needs {MIN_RUNS_OF_TWO_TERMS} runs or more, with different tokens "
            "per parameter"
        )
    if ladder.by_compute.covariance_root is None:
        yield "There is no interval: the law has as many unknowns as there are runs."


def _law_line(law: PowerLaw, names: Sequence[str]) -> str:
    terms = [
        f"{coefficient:.4g} {name}^-{exponent.value:.4f}"
        for name, coefficient, exponent in zip(names, law.coefficients, law.exponents, strict=True)
    ]
    floor = [f"{law.floor.value:.4f}"] if law.has_floor else []
    ranges = [
        f"{what} {_range(each.low, each.high)}"
        for what, each in [
            ("floor", law.floor),
            *((f"exponent of {name}", each) for name, each in zip(names, law.exponents, strict=True)),
        ]
        if each.low is not None and each.high is not None
    ]
    if not law.has_floor:
        ranges.append("the losses show no floor")
    notes = f" ({CONFIDENCE:.0%} intervals: {'; '.join(ranges)})" if law.covariance_root is not None else ""
    return f"L({', '.join(names)}) = {' + '.join([*floor, *terms])}{notes}"


def _range(low: float, high: float) -> str:
    return "not determined" if low * _UNDETERMINED < high else f"{low:.3g} to {high:.3g}"


def _prediction_lines(ladder: LadderFit) -> Iterator[str]:
    for target in ladder.targets:
        by_compute = _shown(ladder.by_compute.predict([target.flops]))
        line = f"{target.name}, {target.flops:.2e} FLOPs: predicted loss {by_compute}"
        if ladder.by_size is not None:
            line += f"; by L(N, D) {_shown(ladder.by_size.predict([target.parameters, target.tokens]))}"
        yield line


def _shown(estimate: Estimate) -> str:
    if estimate.low is None:
        return f"{estimate.value:.4f}"
    assert estimate.high is not None  # as low
    return f"{estimate.value:.4f} ({_range(estimate.low, estimate.high)})"


def _run_record(run: LadderRun) -> dict[str, Any]:
    counts = {"parameters": run.parameters, "all_parameters": run.all_parameters, "tokens": run.tokens}
    return {"run": run.name, **counts, "flops": run.flops}


def _law_record(law: PowerLaw) -> dict[str, Any]:
    return {
        "floor": law.floor._asdict() if law.has_floor else None,
        "coefficients": law.coefficients,
        "exponents": [each._asdict() for each in law.exponents],
        "relative_error": law.error if law.freedom else None,
        "degrees_of_freedom": law.freedom,
    }
