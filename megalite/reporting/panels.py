"""Which charts a report has, and how each figure is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megalite.errors import UserError
from megalite.reporting.chart import Chart, Curve
from megalite.reporting.history import Row
from megalite.reporting.run import Run
from megalite.reporting.series import Floats, Series
from megalite.reporting.ticks import label

SMOOTHED_SHARE = 0.04
"""Of a curve's points, that a smoothed one is the mean over."""
X_NAMES = {"iteration": "iteration", "samples": "consumed_samples", "tokens": "consumed_tokens"}
"""What may stand on the x axis: the metrics file's name."""


@dataclass(frozen=True)
class Panel:
    """One chart: which figures it shows, each as a line of its own.

    Attributes:
        figures: the metrics file's name of each, with what tells it from the others.
        factor: that makes the unit of the metrics file's.
    """

    title: str
    figures: tuple[tuple[str, str], ...]
    unit: str = ""
    factor: float = 1.0
    is_smoothed: bool = False
    from_zero: bool = False


LOSS = Panel("Training loss", (("lm_loss", ""),), is_smoothed=True)
PANELS = (
    Panel("Gradient norm", (("grad_norm", ""),), is_smoothed=True),
    Panel("Learning rate", (("learning_rate", ""),), from_zero=True),
    Panel("Throughput", (("tokens_per_second", ""),), "tokens/s", is_smoothed=True, from_zero=True),
    Panel("Rate of a GPU", (("tflops_per_gpu", ""),), "TFLOP/s", is_smoothed=True, from_zero=True),
    Panel("MFU", (("mfu", ""),), "%", 100.0, is_smoothed=True, from_zero=True),
    Panel("Iteration time", (("iteration_time_ms", ""),), "ms", is_smoothed=True, from_zero=True),
    Panel(
        "Memory of the reporting rank",
        (("memory_allocated_mb", "allocated"), ("memory_reserved_mb", "reserved")),
        "GiB",
        2.0**-10,
        from_zero=True,
    ),
    Panel(
        "Skipped and NaN iterations so far",
        (("total_skipped", "skipped"), ("total_nan", "NaN")),
        from_zero=True,
    ),
    Panel("Loss scale", (("loss_scale", ""),)),
    Panel("Global batch size", (("global_batch_size", ""),), "samples", from_zero=True),
    Panel("Norm of the weights", (("params_norm", ""),)),
    Panel("Zeros in the gradient", (("num_zeros", ""),), from_zero=True),
)
_BOOKKEEPING = {
    *("iteration", "consumed_samples", "consumed_tokens", "train_iters", "num_iterations", "num_skipped"),
    *("num_nan", "skipped", "start_time", "wall_time"),
}
"""Figures that count, or stand in a chart under another name."""


def charts(runs: Sequence[Run], x: str) -> tuple[list[Chart], list[str]]:
    """The charts that have something to show, and a line on each figure that never changes.

    Args:
        x: a key of `X_NAMES`.

    Raises:
        UserError: a run does not tell that figure.
    """
    found, constants = list[Chart](), list[str]()
    for run in runs:
        if x != "iteration" and not any(X_NAMES[x] in row.values for row in run.history.iterations):
            raise UserError(f"--x {x}: {run.source} does not tell them: leave it out")
    extent = _extent(runs, x)
    for panel, curves in _panels(runs, x):
        kept = tuple(curve for curve in curves if len(curve.series) or curve.lost)
        values = np.concatenate([curve.values for curve in kept]) if kept else np.array([])
        strange = any(len(curve.series.strange) for curve in kept)
        if not len(values):
            continue
        is_figure = panel is not LOSS and not any(curve.has_dots for curve in kept)
        if values.min() == values.max() and not strange and is_figure:
            unit = f" {panel.unit}" if panel.unit else ""
            constants.append(f"{panel.title}: {label(float(values[0]))}{unit} throughout")
            continue
        found.append(Chart(panel.title, kept, extent, x, panel.unit, panel.from_zero))
    return found, constants


def _panels(runs: Sequence[Run], x: str) -> Iterator[tuple[Panel, list[Curve]]]:
    yield LOSS, _curves(LOSS, runs, x)
    yield (
        Panel("Validation loss", ()),
        [curve for place in enumerate(runs) for curve in _evaluations(*place, x)],
    )
    for panel in (*PANELS, *_others(runs)):
        yield panel, _curves(panel, runs, x)


def _others(runs: Sequence[Run]) -> Iterator[Panel]:
    """A panel for each figure that this table does not know."""
    known = {name for panel in (LOSS, *PANELS) for name, _ in panel.figures} | _BOOKKEEPING
    names = {name for run in runs for row in run.history.iterations for name in row.values} - known
    for name in sorted(names):
        yield Panel(name.replace("_", " "), ((name, ""),))


def _curves(panel: Panel, runs: Sequence[Run], x: str) -> list[Curve]:
    curves = []
    for colour, run in enumerate(runs):
        place = _x_of(run, x)
        history = run.history
        starts = [sitting.iterations[0] for sitting in history.sittings[1:] if sitting.iterations]
        for dash, (name, words) in enumerate(panel.figures):
            series = _series(history.iterations, name, panel.factor, place)
            width = round(len(series) * SMOOTHED_SHARE) if panel.is_smoothed else 0
            lost = (_series(sitting.lost, name, panel.factor, place) for sitting in history.sittings)
            told = (run.name if len(runs) > 1 else "", words)
            curves.append(
                Curve(
                    name=" ".join(filter(None, told)) or panel.title.lower(),
                    part=words,
                    colour=colour,
                    series=series,
                    dash=dash,
                    lost=tuple(part for part in lost if len(part)),
                    restarts=() if dash else tuple(map(float, place([row.first for row in starts]))),
                    width=width,
                )
            )
    return curves


def _evaluations(colour: int, run: Run, x: str) -> Iterator[Curve]:
    rows, place = run.history.evaluations, _x_of(run, x)
    names = dict.fromkeys(row.name for row in rows)
    for dash, name in enumerate(names):
        own = [row for row in rows if row.name == name]
        series = _series(own, "lm_loss", 1.0, place)
        yield Curve(f"{run.name} {name}", name, colour, series, dash % 4, has_dots=True)


def _series(rows: Sequence[Row], name: str, factor: float, place: Callable[[list[int]], Floats]) -> Series:
    told = [row for row in rows if name in row.values]
    return Series.of(place([row.iteration for row in told]), [row.values[name] * factor for row in told])


def _x_of(run: Run, x: str) -> Callable[[list[int]], Floats]:
    """Where iterations stand on the x axis: an evaluation where its iteration does."""
    if x == "iteration":
        return lambda iterations: np.asarray(iterations, np.float64)
    rows = [row for row in run.history.iterations if X_NAMES[x] in row.values]
    known = np.array([[row.iteration, row.values[X_NAMES[x]]] for row in rows] or [[0.0, 0.0]]).T
    return lambda iterations: np.interp(iterations, known[0], known[1])


def _extent(runs: Sequence[Run], x: str) -> tuple[float, float]:
    """The x range that all charts share."""
    ends = [
        (place([rows[0].first])[0], place([max(row.iteration for row in rows)])[0])
        for run in runs
        for rows in [[row for sitting in run.history.sittings for row in sitting.iterations]]
        for place in [_x_of(run, x)]
    ]
    low, high = min(float(end[0]) for end in ends), max(float(end[1]) for end in ends)
    return (low, high) if low < high else (low - 1, high + 1)
