"""The report as one HTML page that needs nothing else."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from html import escape
from importlib import resources

from megalite.errors import UserError
from megalite.reporting.chart import figure
from megalite.reporting.history import Row
from megalite.reporting.panels import SMOOTHED_SHARE, charts
from megalite.reporting.run import Run
from megalite.reporting.slow import SPENT_ON, Table, duration, tables, time_spent, verdict, when
from megalite.reporting.ticks import label
from megalite.reporting.trace import draw_trace, read_trace

MAX_RUNS = 8
"""Runs that have a colour each."""
RECENT_SHARE = 0.02
"""Of a run's lines, that its last loss is the mean of."""


def page(runs: Sequence[Run], x: str = "iteration") -> str:
    """The whole page; `x` is a key of `panels.X_NAMES`."""
    title = ", ".join(run.name for run in runs)
    found, constants = charts(runs, x)
    parts = [
        f"<h1>{escape(title)}</h1>",
        _summary(runs),
        "<h2>Curves</h2>",
        _legend(runs),
        f'<div class="charts">{"".join(map(figure, found))}</div>',
        f'<p class="note">{escape("; ".join(constants))}</p>' if constants else "",
        "<h2>Where the time went</h2>",
        *(_time(run) for run in runs),
        *_traces(runs),
        "<h2>What was slow</h2>",
        *(part for run in runs for part in _slow(run, len(runs) > 1)),
        "<h2>Config</h2>",
        *map(_config, runs),
    ]
    style, script = (
        resources.files(__package__).joinpath(name).read_text() for name in ("page.css", "page.js")
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body>"
        '<button id="theme" type="button">light / dark</button>'
        f'<main>{"".join(parts)}</main><div id="tip"></div><script>{script}</script></body></html>\n'
    )


def _legend(runs: Sequence[Run]) -> str:
    keys = "".join(
        f'<span class="key"><i class="c{number}"></i>{escape(run.name)}</span>'
        for number, run in enumerate(runs)
    )
    return (
        f'<p class="legend">{keys if len(runs) > 1 else ""}<span class="note">thin: every value; '
        f"thick: mean over {SMOOTHED_SHARE:.0%} of the run around it; dashed grey: made again "
        "after a restart; dotted upright: a restart</span></p>"
    )


def _summary(runs: Sequence[Run]) -> str:
    """One column a run."""
    heads = "".join(f"<th>{escape(run.name)}</th>" for run in runs)
    rows = "".join(
        f"<tr><th>{name}</th>{''.join(f'<td>{escape(value)}</td>' for value in values)}</tr>"
        for name, function in _FACTS.items()
        if any(values := [function(run) for run in runs])
    )
    return f'<table class="summary"><tr><th></th>{heads}</tr>{rows}</table>'


def _told(run: Run, name: str) -> list[float]:
    return [row.values[name] for row in run.history.iterations if name in row.values]


def _median(name: str, unit: str, factor: float = 1.0) -> Callable[[Run], str]:
    def fact(run: Run) -> str:
        told = _told(run, name)
        return f"{label(statistics.median(told) * factor)}{unit}" if told else ""

    return fact


def _last(run: Run) -> Row:
    return run.history.iterations[-1]


def _iterations(run: Run) -> str:
    row = _last(run)
    of = f" of {row.values['train_iters']:,.0f}" if "train_iters" in row.values else ""
    return f"{row.iteration:,}{of}"


def _tokens(run: Run) -> str:
    told = _told(run, "consumed_tokens")
    return label(told[-1]) if told else ""


def _loss(run: Run) -> str:
    told = _told(run, "lm_loss")
    recent = told[-max(1, round(len(told) * RECENT_SHARE)) :]
    return f"{statistics.fmean(recent):.4f}" if recent else ""


def _evaluation(run: Run) -> str:
    """The last one of each dataset, and the best where that is another."""
    words = []
    told = [row for row in run.history.evaluations if "lm_loss" in row.values]
    for name in dict.fromkeys(row.name for row in told):
        rows = [row for row in told if row.name == name]
        finite = [row for row in rows if math.isfinite(row.values["lm_loss"])]
        best = min(finite, key=lambda row: row.values["lm_loss"], default=rows[-1])
        note = "" if best is rows[-1] else f" (best {best.values['lm_loss']:.4f} at {best.iteration})"
        words.append(f"{name} {rows[-1].values['lm_loss']:.4f}{note}")
    return "; ".join(words)


def _memory(run: Run) -> str:
    told = [*_told(run, "memory_reserved_mb"), *_told(run, "memory_allocated_mb")]
    return f"{max(told) / 1024:.2f} GiB" if told else ""


def _faults(run: Run) -> str:
    values = _last(run).values
    parts = [(values.get("total_skipped"), "skipped"), (values.get("total_nan"), "NaN")]
    return ", ".join(f"{count:.0f} {name}" for count, name in parts if count is not None)


def _restarts(run: Run) -> str:
    again = sum(row.iteration - row.first + 1 for sitting in run.history.sittings for row in sitting.lost)
    return f"{len(run.history.sittings) - 1}" + (f", {again} iterations made again" if again else "")


def _written(run: Run) -> str:
    return when(_last(run).wall_time)


_FACTS: dict[str, Callable[[Run], str]] = {
    "iterations": _iterations,
    "tokens": _tokens,
    "last training loss": _loss,
    "evaluations": _evaluation,
    "iteration time": _median("iteration_time_ms", " ms"),
    "tokens/s": _median("tokens_per_second", ""),
    "TFLOP/s a GPU": _median("tflops_per_gpu", ""),
    "MFU": _median("mfu", "%", 100.0),
    "memory": _memory,
    "iterations without an update": _faults,
    "restarts": _restarts,
    "last line (UTC)": _written,
    "from": lambda run: str(run.source),
}


def _time(run: Run) -> str:
    """A bar of what the wall-clock time went into."""
    spent = time_spent(run.history)
    whole = sum(spent.values())
    bar = "".join(
        f'<span class="t{SPENT_ON.index(name)}" style="width:{seconds / whole:.4%}" title="{name}"></span>'
        for name, seconds in spent.items()
    )
    keys = "".join(
        f'<span class="key"><i class="t{SPENT_ON.index(name)}"></i>{name} {duration(seconds)}</span>'
        for name, seconds in spent.items()
    )
    bar = f'<div class="bar">{bar}</div><p class="legend">{keys}</p>' if spent else ""
    return f"<p><b>{escape(run.name)}</b> {escape(verdict(spent))}</p>{bar}"


def _traces(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        if run.trace is None:
            continue
        try:
            drawn, source = draw_trace(read_trace(run.trace)), str(run.trace)
        except UserError as error:
            if run.is_trace_asked_for:
                raise
            drawn, source = "", f"not drawn: {error}"  # its name alone made it a trace
        yield f"<h2>Pipeline of {escape(run.name)}</h2>{drawn}"
        yield f'<p class="note">{escape(source)}</p>'


def _slow(run: Run, is_one_of_many: bool) -> Iterator[str]:
    if is_one_of_many:
        yield f"<h3>{escape(run.name)}</h3>"
    for table in tables(run):
        yield f"<h4>{escape(table.title)}</h4>{_table(table)}"
    if broken := run.history.num_broken:
        yield f'<p class="note">{broken} lines of {escape(str(run.source))} were broken and left out</p>'


def _table(table: Table) -> str:
    heads = "".join(f"<th>{escape(head)}</th>" for head in table.heads)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    return f"<table><tr>{heads}</tr>{rows}</table>"


def _config(run: Run) -> str:
    if not run.config:
        return (
            f'<p class="note">{escape(run.name)}: no checkpoint or TensorBoard folder beside it tells it</p>'
        )
    return (
        f"<details><summary>{escape(run.name)} <span class=note>{escape(run.config_source)}</span></summary>"
        f"<pre>{escape(run.config)}</pre></details>"
    )
