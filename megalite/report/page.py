"""Write the report of runs as one HTML page that opens without a network."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from html import escape

from megalite.errors import UserError
from megalite.report.chart import COLOURS, figure_of, short_number
from megalite.report.expert_figures import load_figure, load_summary, violation_figure
from megalite.report.html_page import html_figure, html_page, html_table
from megalite.report.panels import SMOOTHED_SHARE, charts_of
from megalite.report.plan_comparison import waterfall_figure
from megalite.report.run_folder import Run
from megalite.report.run_history import HistoryRow
from megalite.report.time_report import (
    SPENT_ON,
    Table,
    duration,
    format_time,
    tables,
    time_spent,
    time_summary,
)
from megalite.report.trace_picture import read_trace, trace_figure
from megalite.train.telemetry.time_terms import TimeComparison

MAX_RUNS = 8
"""Number of runs that can have their own colours."""
RECENT_SHARE = 0.02
"""Share of a run's last lines that "last training loss" averages."""


def page(runs: Sequence[Run], x: str = "iteration", comparisons: Sequence[TimeComparison | None] = ()) -> str:
    """Return the whole page.

    Args:
        x: a key of `panels.X_NAMES`.
        comparisons: where the time of each run's iterations went; None for a run that has not recorded it.

    Raises:
        UserError: plotly is not installed, or a run has no metric `x`.
    """
    parts = [
        _summary(runs),
        "<h2>Curves</h2>",
        *_curves(runs, x),
        *(part for index, run in enumerate(runs) for part in _experts(index, run)),
        "<h2>Where the time went</h2>",
        *map(_time, runs),
        *_iteration_times(runs, comparisons),
        *_traces(runs),
        "<h2>What was slow</h2>",
        *(part for run in runs for part in _slow(run, len(runs) > 1)),
        "<h2>Config</h2>",
        *map(_config, runs),
    ]
    return html_page(", ".join(run.name for run in runs), parts)


def _curves(runs: Sequence[Run], x: str) -> Iterator[str]:
    charts, constants = charts_of(runs, x)
    if charts:
        yield (
            f'<p class="note">thin: every value; thick: mean over {SMOOTHED_SHARE:.0%} of the run around it; '
            "dashed grey: repeated after a restart; dotted vertical: a restart. "
            "Drag to zoom, double-click to zoom out.</p>"
        )
        yield html_figure(figure_of(charts, [run.name for run in runs], x), "charts")
    notes = [f"{chart.title}: {note}" for chart in charts if (note := chart.note())]
    yield "".join(f'<p class="note">{escape(line)}</p>' for line in (*notes, "; ".join(constants)) if line)


def _experts(index: int, run: Run) -> Iterator[str]:
    """Yield the tokens of experts by layer over the run, if it has experts."""
    rows = run.history.expert_use
    if not rows:
        return
    yield f"<h2>Experts of {escape(run.name)}</h2><p><b>{escape(load_summary(rows[-1]))}</b></p>"
    yield '<p class="note">Tokens of each expert in a global batch, as multiples of the layer\'s mean.</p>'
    yield html_figure(load_figure(rows), f"loads{index}")
    if len(rows) > 1:
        yield '<p class="note">The largest load of each layer over the run, as a multiple of the mean.</p>'
        yield html_figure(violation_figure(rows), f"violations{index}")


def _summary(runs: Sequence[Run]) -> str:
    """Return a table of `_FACTS` with one column per run; rows that are empty for all runs are omitted."""
    heads = "".join(f"<th>{escape(run.name)}</th>" for run in runs)
    rows = "".join(
        f"<tr><th>{name}</th>{''.join(f'<td>{escape(value)}</td>' for value in values)}</tr>"
        for name, fact in _FACTS.items()
        if any(values := [fact(run) for run in runs])
    )
    return f'<table class="summary"><tr><th></th>{heads}</tr>{rows}</table>'


def _logged(run: Run, name: str) -> list[float]:
    return [row.values[name] for row in run.history.iterations if name in row.values]


def _median(name: str, unit: str, factor: float = 1.0) -> Callable[[Run], str]:
    def fact(run: Run) -> str:
        values = _logged(run, name)
        return f"{short_number(statistics.median(values) * factor)}{unit}" if values else ""

    return fact


def _last(run: Run) -> HistoryRow:
    return run.history.iterations[-1]


def _iterations(run: Run) -> str:
    row = _last(run)
    of = f" of {row.values['train_iters']:,.0f}" if "train_iters" in row.values else ""
    return f"{row.iteration:,}{of}"


def _tokens(run: Run) -> str:
    counts = _logged(run, "consumed_tokens")
    return short_number(counts[-1]) if counts else ""


def _loss(run: Run) -> str:
    losses = _logged(run, "lm_loss")
    recent = losses[-max(1, round(len(losses) * RECENT_SHARE)) :]
    return f"{statistics.fmean(recent):.4f}" if recent else ""


def _evaluation(run: Run) -> str:
    """Return the last loss of each dataset, and the best loss if it is a different one."""
    parts = []
    all_rows = [row for row in run.history.evaluations if "lm_loss" in row.values]
    for name in dict.fromkeys(row.name for row in all_rows):
        rows = [row for row in all_rows if row.name == name]
        finite = [row for row in rows if math.isfinite(row.values["lm_loss"])]
        best = min(finite, key=lambda row: row.values["lm_loss"], default=rows[-1])
        note = "" if best is rows[-1] else f" (best {best.values['lm_loss']:.4f} at {best.iteration})"
        parts.append(f"{name} {rows[-1].values['lm_loss']:.4f}{note}")
    return "; ".join(parts)


def _memory(run: Run) -> str:
    megabytes = [*_logged(run, "memory_reserved_mb"), *_logged(run, "memory_allocated_mb")]
    return f"{max(megabytes) / 1024:.2f} GiB" if megabytes else ""


def _faults(run: Run) -> str:
    values = _last(run).values
    parts = [(values.get("total_skipped"), "skipped"), (values.get("total_nan"), "NaN")]
    return ", ".join(f"{count:.0f} {name}" for count, name in parts if count is not None)


def _restarts(run: Run) -> str:
    again = sum(row.iteration - row.first + 1 for segment in run.history.segments for row in segment.lost)
    return f"{len(run.history.segments) - 1}" + (f", {again} iterations repeated" if again else "")


def _parts(run: Run) -> str:
    """Return which of the run's files were found besides its metrics, and which were not."""
    parts = {
        "checkpoints": bool(run.checkpoints),
        "config": bool(run.config),
        "pipeline trace": run.trace is not None,
        "logs": bool(run.logs),
    }
    found = ", ".join(name for name, is_there in parts.items() if is_there) or "nothing else"
    missing = ", ".join(name for name, is_there in parts.items() if not is_there)
    return f"{found} (without {missing})" if missing else found


def _model(run: Run) -> str:
    """Return the shape of the model, from the newest checkpoint."""
    if run.manifest is None:
        return ""
    model = run.manifest.description["model"]
    sizes = {"num_layers": "layers", "num_attention_heads": "heads"}
    widths = {"hidden_size": "hidden size", "seq_length": "sequence length", "vocab_size": "vocabulary"}
    return ", ".join(
        [f"{model[name]} {what}" for name, what in sizes.items() if name in model]
        + [f"{what} {model[name]}" for name, what in widths.items() if name in model]
    )


def _parameters(run: Run) -> str:
    if run.manifest is None:
        return ""
    pieces = [first for name, (first, *_) in run.manifest.tensors.items() if name.startswith("model.")]
    return f"{sum(math.prod(piece.range.full_shape) for piece in pieces if piece.range is not None):,}"


def _layout(run: Run) -> str:
    """Return the number of ranks per axis, from the newest checkpoint."""
    sizes = {} if run.manifest is None else run.manifest.description.get("layout", {})
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items())


def _device(run: Run) -> str:
    """Return the device's type from the metrics, and its name and the number of ranks from the checkpoint."""
    kind = {"cpu": "CPU", "cuda": "GPU"}.get(run.history.device, "")
    description = {} if run.manifest is None else run.manifest.description
    if "device" not in description:
        return kind
    num_ranks = math.prod(description["layout"].values())
    name = f"{kind} ({description['device']})" if kind else description["device"]
    return f"{num_ranks} {'rank' if num_ranks == 1 else 'ranks'} on {name}"


_FACTS: dict[str, Callable[[Run], str]] = {
    "model": _model,
    "parameters": _parameters,
    "layout": _layout,
    "device": _device,
    "iterations": _iterations,
    "tokens": _tokens,
    "last training loss": _loss,
    "evaluations": _evaluation,
    "iteration time": _median("iteration_time_ms", " ms"),
    "tokens/s": _median("tokens_per_second", ""),
    "TFLOP/s per rank": _median("tflops_per_gpu", ""),
    "MFU": _median("mfu", "%", 100.0),
    "memory of a rank": _memory,
    "iterations without an update": _faults,
    "restarts": _restarts,
    "last line (UTC)": lambda run: format_time(_last(run).wall_time),
    "metrics from": lambda run: str(run.source),
    "with": _parts,
}


def _time(run: Run) -> str:
    """Return a bar of the run's wall-clock time by kind of use."""
    spent = time_spent(run.history)
    whole = sum(spent.values())
    colours = {name: COLOURS[SPENT_ON.index(name)] for name in spent}
    bar = "".join(
        f'<span style="background:{colours[name]};width:{seconds / whole:.4%}" title="{name}"></span>'
        for name, seconds in spent.items()
    )
    legend = [(colours[name], f"{name} {duration(seconds)}") for name, seconds in spent.items()]
    bar = f'<div class="bar">{bar}</div>{_legend(legend)}' if spent else ""
    return f"<p><b>{escape(run.name)}</b> {escape(time_summary(spent))}</p>{bar}"


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    keys = (f'<span><i style="background:{colour}"></i>{escape(text)}</span>' for colour, text in entries)
    return f'<p class="legend">{"".join(keys)}</p>'


def _iteration_times(runs: Sequence[Run], comparisons: Sequence[TimeComparison | None]) -> Iterator[str]:
    """Yield a waterfall of each run's mean iteration, and what made it slow."""
    for index, (run, comparison) in enumerate(zip(runs, comparisons, strict=False)):
        if comparison is None:
            continue
        yield f"<h2>Time of an iteration of {escape(run.name)}</h2>"
        yield "".join(f"<p><b>{escape(line)}</b></p>" for line in comparison.findings())
        yield html_figure(waterfall_figure(comparison), f"waterfall{index}")
        heads, *rows = comparison.table()
        yield html_table(Table("", heads, tuple(rows)))
        yield f'<p class="note">{escape(comparison.note())}</p>'


def _traces(runs: Sequence[Run]) -> Iterator[str]:
    for index, run in enumerate(runs):
        if run.trace is None:
            continue
        yield f"<h2>Pipeline of {escape(run.name)}</h2>"
        try:
            trace = read_trace(run.trace)
        except UserError as error:
            if run.is_trace_requested:
                raise
            # It was found by its name alone, so it may not be a trace at all.
            yield f'<p class="note">{escape(f"not drawn: {error}")}</p>'
            continue
        figure, legend, note = trace_figure(trace)
        yield f"<p><b>{escape(trace.verdict)}</b></p>{_legend(legend)}"
        yield html_figure(figure, f"trace{index}")
        yield f'<p class="note">{escape(", ".join(filter(None, (note, str(run.trace)))))}</p>'


def _slow(run: Run, is_one_of_many: bool) -> Iterator[str]:
    if is_one_of_many:
        yield f"<h3>{escape(run.name)}</h3>"
    for table in tables(run):
        yield f"<h4>{escape(table.title)}</h4>{html_table(table)}"
    if broken := run.history.num_broken:
        yield f'<p class="note">{broken} broken lines of {escape(str(run.source))} were skipped</p>'


def _config(run: Run) -> str:
    if not run.config:
        return f'<p class="note">{escape(run.name)}: no checkpoint or TensorBoard folder with a config</p>'
    return (
        f"<details><summary>{escape(run.name)} <span class=note>{escape(run.config_source)}</span></summary>"
        f"<pre>{escape(run.config)}</pre></details>"
    )
