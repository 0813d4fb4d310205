"""Tables of a run: uses of wall-clock time, slow iterations, starts, saves, log lines, metrics, experts.

An iteration's time is compared with the run's plan, or with its own fastest iteration.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

from megalite.distributed.axes import MODEL
from megalite.observe.report.run_folder import Run
from megalite.observe.report.run_history import POSITIONS, History, HistoryRow, RunSegment
from megalite.observe.unit_record import ATTENTION, GEMMS, MEMORY_BOUND
from megalite.train.telemetry.time_terms import BUBBLE, IMBALANCE, LAUNCHES, TimeComparison, compare
from megalite.utils.errors import UserError, counted
from megalite.utils.files import parse_json

SPENT_ON = ("training", "repeated", "evaluation", "start-up", "saving and other", "down")
"""Uses of wall-clock time. "repeated" means iterations that a later start ran again."""
NUM_SLOWEST = 8
NUM_LINES = 12
_NOTABLE = re.compile(r"straggler: |^(warning|error|critical): |^exiting |^received SIG|requeued")
"""Lines of a log that say why a run was slow or ended."""


@dataclass(frozen=True)
class Table:
    """Table of text."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def time_spent(history: History) -> dict[str, float]:
    """Return the seconds between the first start and the last line, by use (`SPENT_ON`).

    The result is empty if the file has no wall-clock times. An iteration's time does not include evaluations
    and saves: time outside of iterations and evaluations was spent on saving, logging or anything else.
    """
    spent = dict.fromkeys(SPENT_ON, 0.0)
    ended = None
    for segment in history.segments:
        rows = segment.rows
        started = rows[0].values.get("start_time")
        times = [row.wall_time for row in rows]
        if started is None or None in times:
            return {}
        spent["down"] += max(0.0, started - ended) if ended is not None else 0.0
        _add_segment(spent, segment, rows, started)
        ended = rows[-1].wall_time
    return {name: seconds for name, seconds in spent.items() if seconds > 0}


def _add_segment(
    spent: dict[str, float], segment: RunSegment, rows: Sequence[HistoryRow], started: float
) -> None:
    lost = {id(row) for row in segment.lost}
    last_time, last_iteration = started, rows[0].first - 1
    for number, row in enumerate(rows):
        wall = (row.wall_time or 0.0) - last_time
        if row.name:
            # Iterations since the last line are part of the next line's time, not of the evaluation's.
            following = next((each for each in rows[number:] if not each.name), None)
            unlogged = (row.iteration - last_iteration) * _seconds(following) if following else 0.0
            spent["evaluation"] += max(0.0, wall - unlogged)
            last_time += max(0.0, wall - unlogged)
            continue
        inside = _seconds(row) * row.values.get("num_iterations", 1.0)
        spent["repeated" if id(row) in lost else "training"] += inside
        spent["start-up" if last_time == started else "saving and other"] += max(0.0, wall - inside)
        last_time, last_iteration = last_time + wall, row.iteration


def _seconds(row: HistoryRow | None) -> float:
    seconds = 0.0 if row is None else row.values.get("iteration_time_ms", 0.0) / 1e3
    return seconds if math.isfinite(seconds) else 0.0


def tables(run: Run) -> Iterator[Table]:
    """Yield tables of slow iterations, starts and so on; empty tables are omitted."""
    broken = f"{run.history.num_broken} broken lines were skipped"
    found: tuple[tuple[str, tuple[str, ...], Iterable[tuple[str, ...]]], ...] = (
        (
            "Slowest iterations",
            ("iteration", "ms", "times the median", "when (UTC)", "note"),
            _slowest(run),
        ),
        ("Starts", ("from iteration", "when (UTC)", "down before", "repeated"), _starts(run.history)),
        (
            "Layout changes",
            ("after iteration", "from", "to", "seconds", "GB sent", "why"),
            _layout_changes(run.history),
        ),
        ("Checkpoints", ("iteration", "written at (UTC)", "GB", "seconds to write"), _saves(run)),
        ("From its logs", ("file", "line"), _lines(run.logs)),
        ("Damage", ("file", "what"), [(str(run.source), broken)] if run.history.num_broken else []),
    )
    for title, heads, rows in found:
        if cells := tuple(rows):
            yield Table(title, heads, cells)


def _slowest(run: Run) -> Iterator[tuple[str, ...]]:
    rows = [row for segment in run.history.segments for row in segment.iterations if _seconds(row) > 0]
    if len(rows) < 2:
        return
    median = statistics.median(map(_seconds, rows))
    notes = dict(_notes(run))
    for row in sorted(rows, key=_seconds, reverse=True)[:NUM_SLOWEST]:
        which = str(row.iteration) if row.first == row.iteration else f"{row.first} to {row.iteration}"
        milliseconds, times_median = f"{_seconds(row) * 1e3:,.0f}", f"{_seconds(row) / median:.2f}"
        yield which, milliseconds, times_median, format_time(row.wall_time), notes.get(id(row), "")


def _notes(run: Run) -> Iterator[tuple[int, str]]:
    """Yield the id of each row, and what may explain its time."""
    saved = {checkpoint.iteration for checkpoint in run.checkpoints}
    for number, segment in enumerate(run.history.segments):
        evaluated = {row.iteration for row in segment.evaluations}
        changed = {row.iteration for row in segment.layout_changes}
        lost = {id(row) for row in segment.lost}
        for row in segment.iterations:
            parts = []
            if row is segment.iterations[0]:
                parts.append("the first after a restart" if number else "the first")
            parts += ["after an evaluation"] if row.first - 1 in evaluated else []
            parts += ["after a change of the layout"] if row.first - 1 in changed else []
            parts += ["after a save"] if row.first - 1 in saved else []
            parts += [f"{skipped:.0f} skipped"] if (skipped := row.values.get("num_skipped", 0)) else []
            parts += ["repeated later"] if id(row) in lost else []
            yield id(row), ", ".join(parts)


def _starts(history: History) -> Iterator[tuple[str, ...]]:
    for before, after in pairwise([None, *history.segments]):
        assert after is not None
        first = after.rows[0]
        started = first.values.get("start_time")
        ended = before.rows[-1].wall_time if before else None
        down = "" if started is None or ended is None else _pause(started - ended)
        again = sum(row.iteration - row.first + 1 for row in before.lost) if before else 0
        yield str(first.first), format_time(started), down, f"{again} iterations" if again else ""


def _layout_changes(history: History) -> Iterator[tuple[str, ...]]:
    for row in (row for segment in history.segments for row in segment.layout_changes):
        seconds, sent = row.values.get("seconds", 0.0), row.values.get("num_bytes", 0.0) / 1e9
        lost = int(row.values.get("num_lost", 0))
        why = f"{counted(lost, 'rank')} lost" if lost else ""
        yield str(row.iteration), *row.layouts, f"{seconds:.1f}", f"{sent:.3g}", why


def _pause(seconds: float) -> str:
    return (
        duration(seconds) if seconds >= 0 else f"none: the previous start wrote for {duration(-seconds)} more"
    )


def _saves(run: Run) -> Iterator[tuple[str, ...]]:
    for checkpoint in run.checkpoints:
        size = sum(file.stat().st_size for file in checkpoint.folder.iterdir() if file.is_file()) / 1e9
        start, end = checkpoint.start_time, checkpoint.end_time
        yield (
            str(checkpoint.iteration),
            format_time(end),
            f"{size:,.0f}" if size >= 100 else f"{size:.3g}",
            "" if start is None or end is None else f"{end - start:.1f}",
        )


def _lines(logs: Sequence[Path]) -> Iterator[tuple[str, ...]]:
    for log in logs:
        found: dict[str, None] = {}
        try:
            with log.open(encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    if _NOTABLE.search(line):
                        found.pop(line.strip(), None)
                        found[line.strip()] = None
        except OSError as error:
            raise UserError(f"log {log} cannot be read ({error.strerror})") from None
        for text in list(found)[-NUM_LINES:]:
            yield log.name, text[:400]


def metric_table(history: History) -> Table:
    """Return the smallest, median, largest and last finite value of each logged metric, unknown ones too."""
    values: dict[str, list[float]] = {}
    for row in history.iterations:
        for name, value in row.values.items():
            if name != "iteration" and name not in POSITIONS:
                values.setdefault(name, []).append(value)
    rows = []
    for name, logged in values.items():
        finite = [value for value in logged if math.isfinite(value)]
        figures = (min(finite), statistics.median(finite), max(finite), finite[-1]) if finite else ()
        cells = map(short_number, figures) if figures else ("",) * 4
        rows.append((name, *cells, str(len(logged) - len(finite))))
    heads = ("metric", "smallest", "median", "largest", "last", "NaN or infinite")
    return Table("Of the iterations that count", heads, tuple(rows))


def expert_table(row: HistoryRow) -> Table:
    """Return the loads of each layer's experts in one iteration, as multiples of the layer's mean."""
    rows = tuple(
        (
            layer,
            f"{1.0 + each.max_violation:.2f}",
            str(each.tokens.index(max(each.tokens))),
            f"{min(each.tokens) * len(each.tokens) / max(1, sum(each.tokens)):.2f}",
            f"{each.entropy:.3f}",
            str(each.dropped),
        )
        for layer, each in row.loads.items()
    )
    heads = ("layer", "largest load", "of expert", "smallest load", "entropy (nats)", "dropped")
    return Table(f"Iteration {row.iteration}; loads are multiples of the layer's mean", heads, rows)


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


def format_time(seconds: float | None) -> str:
    """Format a time in seconds since 1970 (UTC); empty for None."""
    if seconds is None:
        return ""
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):  # outside of the calendar
        return ""


def duration(seconds: float) -> str:
    """Format a length of time in its two largest units."""
    for unit, name, smaller, small_name in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if seconds >= unit:
            return f"{int(seconds // unit)} {name} {int(seconds % unit // smaller)} {small_name}"
    return f"{seconds:.1f} s"


def time_summary(spent: Mapping[str, float]) -> str:
    """Return `time_spent` in one line of text."""
    whole = sum(spent.values())
    if not whole:
        return "the metrics file has no wall-clock times"
    parts = ", ".join(
        f"{name} {seconds / whole:.0%}" for name, seconds in spent.items() if seconds >= 0.005 * whole
    )
    return f"{duration(whole)}: {parts}"


_COMPUTING = {
    "products": GEMMS,
    "attention": ATTENTION,
    "passes": MEMORY_BOUND,
    "launch": LAUNCHES,
    "offload": LAUNCHES,
}
"""Term of a run that measures each kind of a plan's computation, on a rank of the median stage."""
_WAITING = {**{name: f"{name} wait" for name in (*MODEL.names, "ep")}, "bubble": BUBBLE}
"""Term of a run that measures each of the other kinds, on the busiest rank."""
_TOLERANCE = 0.01
"""Relative difference in a token's operations that the padding of the vocabulary may cause."""
_PLAN = "pass the output of `megalite plan --json` with the flags of the run"


def time_comparison(run: Run, plan: Path | None = None) -> TimeComparison | None:
    """Compare the run's mean iteration with a plan, or with the run's own fastest iteration.

    Args:
        plan: output of ``megalite plan --json``.

    Returns:
        The comparison; None without a plan if the run has not recorded where its time went.

    Raises:
        UserError: the plan cannot be read or is of another run, or the run has recorded nothing.
    """
    samples = run.history.samples
    if plan is None:
        return compare(samples) if samples else None
    if not samples:
        raise UserError(
            f"--against-plan {plan}: {run.source} does not say where the time of an iteration went: train "
            "with --log-time-breakdown, and with a --log-interval shorter than the run"
        )
    planned = _read(plan)
    _check(planned, plan, run)
    return compare(samples, planned_terms(planned), f"the plan {plan}")


def planned_terms(planned: Mapping[str, Any]) -> dict[str, float]:
    """Return the planned seconds by the terms of a run."""
    busiest = planned["seconds_by_kind"]
    median = planned.get("median_stage_seconds_by_kind", busiest)
    terms = {IMBALANCE: sum(busiest.get(kind, 0.0) - median.get(kind, 0.0) for kind in _COMPUTING)}
    for names, seconds in ((_COMPUTING, median), (_WAITING, busiest)):
        for kind, term in names.items():
            terms[term] = terms.get(term, 0.0) + seconds.get(kind, 0.0)
    return terms


def _read(path: Path) -> dict[str, Any]:
    try:
        planned = parse_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"--against-plan {path} cannot be read ({error.strerror}): {_PLAN}") from None
    except ValueError:
        raise UserError(f"--against-plan {path} is not a plan in JSON: {_PLAN}") from None
    if isinstance(planned, dict) and "layouts" in planned:
        raise UserError(f"--against-plan {path} is a search of layouts: plan the layout of the run")
    names = ("iteration_time_s", "tokens_per_second", "tflops_per_gpu")
    kinds = planned.get("seconds_by_kind") if isinstance(planned, dict) else None
    if not (
        isinstance(kinds, dict)
        and all(type(value) in (int, float) for value in kinds.values())
        and all(type(planned.get(name)) in (int, float) and planned[name] > 0 for name in names)
        and isinstance(planned.get("layout"), dict)
    ):
        raise UserError(f"--against-plan {path} is not a plan of one layout: {_PLAN}")
    return planned


def _check(planned: Mapping[str, Any], path: Path, run: Run) -> None:
    """Check that a plan is of the run's model, number of ranks, batch and layout."""
    sample = run.history.samples[-1]
    differences = []
    of_run = {axis: size for axis, size in sample.layout.items() if axis in planned["layout"]}
    of_plan = {axis: planned["layout"][axis] for axis in of_run}
    if of_run != of_plan:
        differences.append(f"layout {_sizes(of_plan)}, the run {_sizes(of_run)}")
    values = next(row.values for row in reversed(run.history.iterations) if row.sample)
    tokens = planned["tokens_per_second"] * planned["iteration_time_s"]
    trained = values.get("global_batch_size", math.nan) * _ratio(
        values, "consumed_tokens", "consumed_samples"
    )
    if not math.isclose(tokens, trained, rel_tol=1e-6):
        differences.append(f"{tokens:,.0f} tokens per iteration, the run {trained:,.0f}")
    # Both are the operations of a token, divided by the number of ranks.
    in_plan = _ratio(planned, "tflops_per_gpu", "tokens_per_second")
    in_run = _ratio(values, "tflops_per_gpu", "tokens_per_second")
    if of_run == of_plan and not math.isclose(in_plan, in_run, rel_tol=_TOLERANCE):
        ranks = math.prod(sample.layout.values())
        differences.append(
            f"{in_plan * ranks * 1e3:.4g} GFLOP per token, the run {in_run * ranks * 1e3:.4g}: another model"
        )
    if differences:
        raise UserError(f"--against-plan {path} is of another run: it has {'; '.join(differences)}: {_PLAN}")


def _ratio(values: Mapping[str, float], above: str, below: str) -> float:
    return values.get(above, math.nan) / (values.get(below) or math.nan)


def _sizes(layout: Mapping[str, int]) -> str:
    return " ".join(f"{axis} {size}" for axis, size in layout.items())
