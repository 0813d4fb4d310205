"""Fit a ladder by power laws, and report the fit as lines, as an object for JSON, and as an HTML page.

Losses are fitted by a floor and power laws: L = E + A C^-a, and L = E + A N^-a + B D^-b. The second form is
that of Hoffmann et al. 2022 (arXiv 2203.15556, approach 3). A fit minimizes the squares of the relative
errors of the losses. Its unknowns are logarithms, since E, A and a are positive. Intervals follow from the
covariance of the linearized fit and the quantiles of Student's t distribution, which are wide if there are
few more runs than unknowns.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalite.observe.report.page import html_page, html_table
from megalite.observe.report.time_report import Table
from megalite.plan.ladder.finished_runs import FinishedRun
from megalite.plan.ladder.sizes import LadderRun, table_lines
from megalite.utils.errors import UserError

Floats = NDArray[np.float64]

CONFIDENCE = 0.95
MIN_RUNS_OF_TWO_TERMS = 6
"""Runs that L(N, D) needs: one more than its unknowns."""
_FLAT = 1e-6
"""Smallest exponent of a law that counts as different from 0."""
_START_EXPONENTS = (0.05, 0.2, 0.6)
_START_FLOORS = (0.1, 0.5, 0.9)
"""Floors at which fits start, as shares of the lowest loss."""
_SMALLEST_FLOOR = 1e-3
"""Share of the lowest loss below which a fitted floor is 0: then the losses show none."""
_SMALLEST_SINGULAR = 1e-12
"""Smallest singular value of the slopes that counts as different from 0, relative to the largest."""
_MIN_SPREAD = 0.05
"""Smallest spread of log(D / N) over the runs at which the terms of N and D can be distinguished."""


class Estimate(NamedTuple):
    """Number with its interval. The bounds are None if there are as many unknowns as runs."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class PowerLaw:
    """Fitted law: the loss is a floor plus `coefficient * x^-exponent` for each quantity x.

    Attributes:
        unknowns: log of the floor, if there is one; then for each term the log of its value at `centers` and
            the log of its exponent.
        centers: geometric mean of each quantity over the runs.
        covariance_root: a matrix R for which the covariance of the unknowns is R^T R; None without degrees of
            freedom.
        error: standard deviation of the relative errors of the losses.
        freedom: degrees of freedom: runs less unknowns.
    """

    unknowns: Floats
    centers: Floats
    has_floor: bool
    covariance_root: Floats | None
    error: float
    freedom: int

    @property
    def floor(self) -> Estimate:
        """Return E."""
        return self._exponential(0) if self.has_floor else Estimate(0.0, None, None)

    @property
    def exponents(self) -> list[Estimate]:
        """Return the exponent of each term."""
        first = int(self.has_floor)
        return [self._exponential(first + 2 * term + 1) for term in range(len(self.centers))]

    @property
    def coefficients(self) -> list[float]:
        """Return A of each term."""
        first, powers = int(self.has_floor), [each.value for each in self.exponents]
        values = np.exp(self.unknowns[first::2])
        return [
            float(value * center**power)
            for value, center, power in zip(values, self.centers, powers, strict=True)
        ]

    def predict(self, quantities: Sequence[float]) -> Estimate:
        """Return the loss of a run. The interval contains the error of a single run."""
        point = np.array([quantities], dtype=np.float64)
        value = float(_log_losses(self.unknowns, point / self.centers, self.has_floor)[0])
        if self.covariance_root is None:
            return Estimate(float(np.exp(value)), None, None)
        slope = _slopes(self.unknowns, point / self.centers, self.has_floor)[0]
        deviation = np.hypot(np.linalg.norm(self.covariance_root @ slope), self.error)
        spread = float(deviation) * _quantile(self.freedom)
        return Estimate(*map(_bounded_exp, (value, value - spread, value + spread)))

    def _exponential(self, index: int) -> Estimate:
        value = float(self.unknowns[index])
        if self.covariance_root is None:
            return Estimate(float(np.exp(value)), None, None)
        spread = float(np.linalg.norm(self.covariance_root[:, index])) * _quantile(self.freedom)
        return Estimate(*map(_bounded_exp, (value, value - spread, value + spread)))


def fit_power_law(quantities: Sequence[Sequence[float]], losses: Sequence[float]) -> PowerLaw:
    """Fit the law to runs. The law has no floor if the losses show none.

    Args:
        quantities: of each run: its compute, or its parameters and its tokens.

    Raises:
        UserError: scipy is not installed, or the losses do not fall with the first quantity.
    """
    points, logs = np.array(quantities, dtype=np.float64), np.log(np.array(losses, dtype=np.float64))
    if np.polyfit(np.log(points[:, 0]), logs, 1)[0] > -_FLAT:
        raise UserError("the losses do not fall with the size of the runs: there is no law to fit")
    centers = np.exp(np.log(points).mean(axis=0))
    scaled = points / centers
    has_floor = True
    found = _least_squares(scaled, logs, has_floor)
    if len(logs) < len(found.x) or np.exp(found.x[0]) < _SMALLEST_FLOOR * np.exp(logs.min()):
        has_floor = False
        found = _least_squares(scaled, logs, has_floor)
    freedom = len(logs) - len(found.x)
    error = float(np.sqrt(2 * found.cost / freedom)) if freedom > 0 else 0.0
    root = None
    if freedom > 0:
        _, singular, directions = np.linalg.svd(_slopes(found.x, scaled, has_floor), full_matrices=False)
        # What the runs say nothing about has a huge variance, not an infinite one.
        root = error * directions / np.maximum(singular, _SMALLEST_SINGULAR * singular.max())[:, None]
    return PowerLaw(found.x, centers, has_floor, root, error, max(freedom, 0))


def can_separate(parameters: Sequence[float], tokens: Sequence[float]) -> bool:
    """Return whether runs tell the effect of parameters from the effect of tokens."""
    spread = float(np.std(np.log(np.array(tokens) / np.array(parameters))))
    return len(parameters) >= MIN_RUNS_OF_TWO_TERMS and spread > _MIN_SPREAD


def _log_losses(unknowns: Floats, scaled: Floats, has_floor: bool) -> Floats:
    first = int(has_floor)
    terms = unknowns[first::2] - np.exp(unknowns[first + 1 :: 2]) * np.log(scaled)  # [runs, terms]
    if has_floor:
        terms = np.concatenate([np.full((len(scaled), 1), unknowns[0]), terms], axis=1)
    total: Floats = np.logaddexp.reduce(terms, axis=1)
    return total


def _slopes(unknowns: Floats, scaled: Floats, has_floor: bool) -> Floats:
    """Return the derivatives of `_log_losses` by the unknowns, [runs, unknowns]."""
    first = int(has_floor)
    totals = _log_losses(unknowns, scaled, has_floor)[:, None]
    exponents = np.exp(unknowns[first + 1 :: 2])
    shares = np.exp(unknowns[first::2] - exponents * np.log(scaled) - totals)  # of the loss, [runs, terms]
    slopes = np.empty((len(scaled), len(unknowns)))
    if has_floor:
        slopes[:, :1] = np.exp(unknowns[0] - totals)
    slopes[:, first::2] = shares
    slopes[:, first + 1 :: 2] = -shares * exponents * np.log(scaled)
    return slopes


def _least_squares(scaled: Floats, logs: Floats, has_floor: bool) -> Any:
    """Return the best of the fits from several starts."""
    try:
        from scipy.optimize import least_squares
    except ImportError:
        raise UserError("the fit needs scipy: pip install scipy") from None
    num_terms, lowest, middle = scaled.shape[1], float(logs.min()), float(logs.mean())
    fits = []
    for share in _START_FLOORS if has_floor else (0.0,):
        floor = [lowest + np.log(share)] if has_floor else []
        above = np.log(np.exp(middle) - share * np.exp(lowest))
        for exponents in itertools.product(_START_EXPONENTS, repeat=num_terms):
            terms = [number for each in exponents for number in (above - np.log(num_terms), np.log(each))]
            fits.append(
                least_squares(
                    lambda unknowns: _log_losses(unknowns, scaled, has_floor) - logs,
                    np.array([*floor, *terms]),
                    jac=lambda unknowns: _slopes(unknowns, scaled, has_floor),
                    method="lm",
                    xtol=1e-12,
                    ftol=1e-12,
                    gtol=1e-12,
                )
            )
    return min(fits, key=lambda fit: float(fit.cost))


def _quantile(freedom: int) -> float:
    from scipy.stats import t

    return float(t.ppf((1 + CONFIDENCE) / 2, freedom))


def _bounded_exp(value: float) -> float:
    """Return exp(value), at most 1e300, so that JSON can hold it."""
    return float(np.exp(min(value, 690.0)))


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
    by_size = fit_power_law(sizes, losses) if can_separate(*zip(*sizes, strict=True)) else None
    return LadderFit(
        tuple(runs), fit_power_law([(each.run.flops,) for each in runs], losses), by_size, tuple(targets)
    )


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
