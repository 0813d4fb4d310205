"""Write a report, of runs or of a prepared corpus, as one HTML page of tables that needs no network."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from megalite.observe.report.run_folder import Run, trace_summary
from megalite.observe.report.run_history import TASKS, HistoryRow
from megalite.observe.report.time_report import (
    SPENT_ON,
    Table,
    duration,
    expert_table,
    format_time,
    metric_table,
    short_number,
    tables,
    time_spent,
    time_summary,
)
from megalite.train.telemetry.time_terms import TimeComparison

COLOURS = ("#2f81e0", "#e8743b", "#19a974", "#c954b0", "#bf9000", "#1797b5")
"""Colours of `SPENT_ON`, readable on a light and a dark page."""
_TOTAL, _LONGER, _SHORTER = COLOURS[0], "#d92d20", COLOURS[2]
"""Colours of a waterfall."""
RECENT_SHARE = 0.02
"""Share of a run's last lines that "last training loss" averages."""


def html_page(title: str, parts: Iterable[str], head: str = "") -> str:
    """Return a whole page: a title, then parts in HTML.

    Args:
        head: more HTML for the page's head.
    """
    title = escape(title)
    style = resources.files(__package__).joinpath("page.css").read_text()
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{style}</style>{head}</head>"
        f"<body><main><h1>{title}</h1>{''.join(parts)}</main></body></html>\n"
    )


def html_table(table: Table) -> str:
    """Return a table without its title."""
    heads = "".join(f"<th>{escape(head)}</th>" for head in table.heads)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    return f"<table><tr>{heads}</tr>{rows}</table>"


def page(runs: Sequence[Run], comparisons: Sequence[TimeComparison | None] = ()) -> str:
    """Return the whole page.

    Args:
        comparisons: where the time of each run's iterations went; None for a run that has not recorded it.
    """
    parts = [
        _summary(runs),
        "<h2>Where the time went</h2>",
        *map(_time, runs),
        *_iteration_times(runs, comparisons),
        *map(_trace, runs),
        "<h2>What was slow</h2>",
        *(part for run in runs for part in _tables(run, tables(run), len(runs) > 1)),
        "<h2>Metrics</h2>",
        *(part for run in runs for part in _tables(run, (metric_table(run.history),), len(runs) > 1)),
        *map(_experts, runs),
        *map(_data_phases, runs),
        "<h2>Config</h2>",
        *map(_config, runs),
    ]
    return html_page(", ".join(run.name for run in runs), parts)


def _tables(run: Run, shown: Iterable[Table], is_one_of_many: bool) -> Iterator[str]:
    if is_one_of_many:
        yield f"<h3>{escape(run.name)}</h3>"
    for table in shown:
        yield f"<h4>{escape(table.title)}</h4>{html_table(table)}"


def _experts(run: Run) -> str:
    rows = run.history.expert_use
    if not rows:
        return ""
    table = expert_table(rows[-1])
    return f"<h2>Experts of {escape(run.name)}</h2><h4>{table.title}</h4>{html_table(table)}"


def _data_phases(run: Run) -> str:
    """Return the phases of the training data and their weights, from the newest checkpoint."""
    description = {} if run.manifest is None else run.manifest.description
    if not (mixture := (description.get("corpora") or {}).get("mixture")):  # None with --mock-data
        return ""
    consumed = description["progress"]["consumed_samples"]
    firsts = [first for first, *_ in mixture["phases"]]
    rows = []
    for number, (first, weights, ramp) in enumerate(mixture["phases"], 1):
        start = f"from {_weights(ramp[1])} to " if ramp else ""
        is_over = number < len(firsts) and firsts[number] <= consumed
        state = "over" if is_over else "now" if first <= consumed else "later"
        rows.append((str(number), f"{first:,}", f"{start}{_weights(weights)}", state))
    table = Table("", ("phase", "first sample", "weights", "state"), tuple(rows))
    ended = (f"{name} ran out at sample {at:,}" for name, at in mixture["exhausted"].items() if at < consumed)
    notes = "".join(f"<p>{escape(note)}</p>" for note in ended)
    title = f"Data of {escape(run.name)}, at sample {consumed:,}"
    return f"<h2>{title}</h2>{html_table(table)}{notes}"


def _weights(weights: Mapping[str, float]) -> str:
    total = sum(weights.values())
    return ", ".join(f"{name} {weight / total:.1%}" for name, weight in weights.items())


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


def _scores(run: Run) -> str:
    rows = [row for row in run.history.evaluations if row.name == TASKS]
    scores = rows[-1].values if rows else {}
    return "; ".join(f"{name} {value:.4f}" for name, value in scores.items() if "/" in name)


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
    "task scores": _scores,
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
    for run, comparison in zip(runs, comparisons, strict=False):
        if comparison is None:
            continue
        yield f"<h2>Time of an iteration of {escape(run.name)}</h2>"
        yield "".join(f"<p><b>{escape(line)}</b></p>" for line in comparison.findings())
        yield _waterfall(comparison)
        heads, *rows = comparison.table()
        yield html_table(Table("", heads, tuple(rows)))
        yield f'<p class="note">{escape(comparison.note())}</p>'


def _waterfall(comparison: TimeComparison) -> str:
    """Return bars from the expected to the measured time: each starts where the one above ends."""
    changes = [(term.name, term.seconds - term.expected) for term in comparison.terms]
    bars = [("expected", 0.0, comparison.expected, _TOTAL)]
    for name, change in changes:
        if abs(change) >= 5e-5:
            bars.append((name, bars[-1][2], bars[-1][2] + change, _LONGER if change > 0 else _SHORTER))
    bars.append(("measured", 0.0, comparison.seconds, _TOTAL))
    whole = max(max(start, end) for _, start, end, _ in bars) or 1.0
    rows = "".join(
        f'<tr><th>{escape(name)}</th><td><span style="margin-left:{min(start, end) / whole:.2%};'
        f'width:{abs(end - start) / whole:.2%};background:{colour}"></span></td>'
        f"<td>{1e3 * (end - start):{'.1f' if colour == _TOTAL else '+.1f'}} ms</td></tr>"
        for name, start, end, colour in bars
    )
    return f'<table class="waterfall">{rows}</table>'


def _trace(run: Run) -> str:
    """Return the time breakdown that a pipeline trace contains, and where to open the trace."""
    if run.trace is None:
        return ""
    return (
        f"<h2>Pipeline of {escape(run.name)}</h2><p><b>{escape(trace_summary(run.trace))}</b></p>"
        f'<p class="note">to see its actions, open {escape(str(run.trace))} in ui.perfetto.dev</p>'
    )


def _config(run: Run) -> str:
    if not run.config:
        return f'<p class="note">{escape(run.name)}: no checkpoint or TensorBoard folder with a config</p>'
    return (
        f"<details><summary>{escape(run.name)} <span class=note>{escape(run.config_source)}</span></summary>"
        f"<pre>{escape(run.config)}</pre></details>"
    )


def corpus_page(prefix: str, report: dict[str, Any]) -> str:
    """Return the page.

    Args:
        report: contents of PREFIX.report.json.
    """
    tables = [_flow(report), *_examples(report)]
    tables += [
        Table(title, heads, tuple((name, f"{count:,}") for name, count in report[key].items()))
        for key, title, heads in (
            ("languages", "Languages", ("language", "documents")),
            ("contaminated_items", "Evaluation items found in documents", ("item", "documents removed")),
        )
    ]
    groups = tuple(
        (f"{each['documents']:,}", each["step"], each["first"], each["text"])
        for each in report["duplicate_groups"]
    )
    tables.append(Table("Largest groups of duplicates", ("documents", "step", "first", "text"), groups))
    parts = (f"<h2>{escape(table.title)}</h2>{html_table(table)}" for table in tables if table.rows)
    return html_page(f"Corpus {prefix}", parts)


def _flow(report: dict[str, Any]) -> Table:
    output, special = report["output"], report["special_tokens_in_text"]
    rows = [("read", f"{report['documents']:,}", "", f"{report['bytes']:,}", "")]
    rows += [
        (
            step["step"],
            f"{step['documents_out']:,}",
            f"{step['documents_in'] - step['documents_out']:,}",
            f"{step['bytes_out']:,}",
            "",
        )
        for step in report["steps"]
    ]
    rows.append(("output", f"{output['documents']:,}", "", f"{output['bytes']:,}", f"{output['tokens']:,}"))
    rows += [
        (name, f"{count:,}", "", "", "")
        for name, count in (
            ("bad, skipped", report["bad"]),
            ("without tokens, skipped", output["empty"]),
            ("with names of special tokens", special["documents"]),
        )
        if count
    ]
    return Table("Steps", ("step", "documents left", "removed", "bytes left", "tokens"), tuple(rows))


def _examples(report: dict[str, Any]) -> Iterator[Table]:
    special = report["special_tokens_in_text"]["examples"]
    named = [(f"Removed by {step['step']}", step["examples"]) for step in report["steps"]]
    for title, examples in (*named, ("Bad", report["bad_examples"]), ("Names of special tokens", special)):
        rows = tuple((each["from"], each["reason"], each["text"]) for each in examples)
        yield Table(title, ("from", "reason", "text"), rows)
