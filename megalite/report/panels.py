"""Choose the charts of a report page and the curves of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megalite.errors import UserError
from megalite.report.chart import DASHES, Chart, Curve, short_number
from megalite.report.run_folder import Run
from megalite.report.run_history import TASKS, HistoryRow
from megalite.report.series import Floats, Series

SMOOTHED_SHARE = 0.04
"""Share of a curve's points that each point of the smoothed line averages."""
X_NAMES = {"iteration": "iteration", "samples": "consumed_samples", "tokens": "consumed_tokens"}
"""Choices of --x, and the metric of each."""


@dataclass(frozen=True)
class Panel:
    """Describes a chart and its metrics. Each metric has its own line.

    Attributes:
        metrics: each metric's name in the metrics file, and its name in the legend (empty for a single one).
        factor: factor from the metrics file's unit to `unit`.
    """

    title: str
    metrics: tuple[tuple[str, str], ...]
    unit: str = ""
    factor: float = 1.0
    is_smoothed: bool = False
    from_zero: bool = False


LOSS = Panel("Training loss", (("lm_loss", ""),), is_smoothed=True)
PANELS = (
    Panel("Gradient norm", (("grad_norm", ""),), is_smoothed=True),
    Panel("Learning rate", (("learning_rate", ""),), from_zero=True),
    Panel("Learning rate of embedding and output layer", (("decoupled_learning_rate", ""),), from_zero=True),
    Panel("Throughput", (("tokens_per_second", ""),), "tokens/s", is_smoothed=True, from_zero=True),
    Panel("Rate of a rank", (("tflops_per_gpu", ""),), "TFLOP/s", is_smoothed=True, from_zero=True),
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
    Panel(
        "Load of the reporting machine",
        (("gpu_percent", "GPU"), ("cpu_percent", "CPU, all cores")),
        "%",
        is_smoothed=True,
        from_zero=True,
    ),
    *(
        Panel(
            f"{what} of the reporting machine",
            tuple((f"{name}_{way}_mb_per_second", way) for way in ways),
            "MB/s",
            is_smoothed=True,
            from_zero=True,
        )
        for what, name, ways in (
            ("Disk", "disk", ("read", "write")),
            ("Network", "network", ("receive", "send")),
            ("InfiniBand", "infiniband", ("receive", "send")),
        )
    ),
)
_NOT_DRAWN = {
    *("iteration", "consumed_samples", "consumed_tokens", "train_iters", "num_iterations", "num_skipped"),
    *("num_nan", "skipped", "start_time", "wall_time"),
}
"""Counters, and metrics that a chart shows under another name."""
_ON_CPU = {"memory_allocated_mb": "resident", "memory_reserved_mb": "peak resident"}
"""Legend for metrics that measure different things on a CPU and on a GPU; see `ProcessMemory`."""


def charts_of(runs: Sequence[Run], x: str) -> tuple[list[Chart], list[str]]:
    """Return the charts that have data to show, and a line about each metric that never changes.

    Args:
        x: a key of `X_NAMES`.

    Raises:
        UserError: a run has no such metric.
    """
    found, constants = list[Chart](), list[str]()
    for run in runs:
        if x != "iteration" and not any(X_NAMES[x] in row.values for row in run.history.iterations):
            raise UserError(f"--x {x}: {run.source} has no {X_NAMES[x]}: remove --x")
    evaluations = [curve for index, run in enumerate(runs) for curve in _evaluations(index, run, x)]
    found_curves = [(panel, _curves(panel, runs, x)) for panel in (LOSS, *PANELS, *_others(runs))]
    scores = [curve for index, run in enumerate(runs) for curve in _task_scores(index, run, x)]
    found_curves[1:1] = [(Panel("Validation loss", ()), evaluations), (Panel("Task scores", ()), scores)]
    for panel, curves in found_curves:
        kept = tuple(curve for curve in curves if len(curve.series) or curve.lost)
        if len({curve.dash for curve in kept}) == 1:
            kept = tuple(replace(curve, dash=0) for curve in kept)
        chart = Chart(panel.title, kept, panel.unit, panel.from_zero)
        values = chart.values
        if not len(values):
            continue
        is_constant = values.min() == values.max() and not chart.num_not_finite
        if is_constant and panel.metrics and panel is not LOSS:
            unit = f" {panel.unit}" if panel.unit else ""
            constants.append(f"{panel.title}: {short_number(float(values[0]))}{unit} throughout")
        else:
            found.append(chart)
    return found, constants


def _others(runs: Sequence[Run]) -> Iterator[Panel]:
    """Yield a panel for each metric that is not in `PANELS`, such as a later version's metric."""
    known = {name for panel in (LOSS, *PANELS) for name, _ in panel.metrics} | _NOT_DRAWN
    names = {name for run in runs for row in run.history.iterations for name in row.values} - known
    for name in sorted(names):
        yield Panel(name.replace("_", " "), ((name, ""),), is_smoothed=name.endswith("_loss"))


def _curves(panel: Panel, runs: Sequence[Run], x: str) -> list[Curve]:
    curves = []
    for index, run in enumerate(runs):
        to_x = _x_of(run, x)
        history = run.history
        starts = [segment.iterations[0].first for segment in history.segments[1:] if segment.iterations]
        for dash, (name, part) in enumerate(panel.metrics):
            part = _ON_CPU.get(name, part) if history.device == "cpu" else part
            series = _series(history.iterations, name, panel.factor, to_x)
            lost = (_series(segment.lost, name, panel.factor, to_x) for segment in history.segments)
            names = (run.name if len(runs) > 1 else "", part)
            curves.append(
                Curve(
                    name=" ".join(filter(None, names)) or panel.title.lower(),
                    run=index,
                    series=series,
                    part=part,
                    dash=dash,
                    lost=tuple(each for each in lost if len(each)),
                    restarts=() if dash else tuple(map(float, to_x(starts))),
                    width=round(len(series) * SMOOTHED_SHARE) if panel.is_smoothed else 0,
                )
            )
    return curves


def _evaluations(index: int, run: Run, x: str) -> Iterator[Curve]:
    rows, to_x = run.history.evaluations, _x_of(run, x)
    names = dict.fromkeys(row.name for row in rows)
    for dash, name in enumerate(names):
        series = _series([row for row in rows if row.name == name], "lm_loss", 1.0, to_x)
        yield Curve(f"{run.name} {name}", index, series, name, dash % len(DASHES), has_dots=True)


def _task_scores(index: int, run: Run, x: str) -> Iterator[Curve]:
    rows, to_x = [row for row in run.history.evaluations if row.name == TASKS], _x_of(run, x)
    names = dict.fromkeys(name for row in rows for name in row.values if "/" in name)
    for dash, name in enumerate(names):
        series = _series(rows, name, 1.0, to_x)
        yield Curve(f"{run.name} {name}", index, series, name, dash % len(DASHES), has_dots=True)


def _series(
    rows: Sequence[HistoryRow], name: str, factor: float, to_x: Callable[[list[int]], Floats]
) -> Series:
    logged = [row for row in rows if name in row.values]
    return Series.of(to_x([row.iteration for row in logged]), [row.values[name] * factor for row in logged])


def _x_of(run: Run, x: str) -> Callable[[list[int]], Floats]:
    """Return a function from iterations to x. An evaluation has the x of its iteration."""
    if x == "iteration":
        return lambda iterations: np.asarray(iterations, np.float64)
    rows = [row for row in run.history.iterations if X_NAMES[x] in row.values]
    known = np.array([[row.iteration, row.values[X_NAMES[x]]] for row in rows]).T
    return lambda iterations: np.interp(iterations, known[0], known[1])
