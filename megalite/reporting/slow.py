"""Where a run's time went: its parts, its slowest iterations, its restarts, its saves, what it said."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path

from megalite.errors import UserError
from megalite.reporting.history import History, Row, Sitting
from megalite.reporting.run import Checkpoint, Run

SPENT_ON = ("training", "made again", "evaluation", "start-up", "saving and other", "down")
"""What wall-clock time goes into."""
NUM_SLOWEST = 8
NUM_LINES = 12
_TELLING = re.compile(r"straggler: |^(warning|error|critical): |^exiting |^received SIG|requeued")
"""Lines of a log that say why a run was slow or ended."""


@dataclass(frozen=True)
class Table:
    """Rows of text; the first column is what the others are about."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def time_spent(history: History) -> dict[str, float]:
    """Seconds between the first start and the last line, by what they were spent on.

    Empty where the file does not tell wall-clock times. An iteration's time is without evaluations and saves,
    so what no iteration and no evaluation accounts for was saving, logging or anything else.
    """
    spent = dict.fromkeys(SPENT_ON, 0.0)
    ended = None
    for sitting in history.sittings:
        rows = sitting.rows
        started = rows[0].values.get("start_time")
        times = [row.wall_time for row in rows]
        if started is None or None in times:
            return {}
        spent["down"] += max(0.0, started - ended) if ended is not None else 0.0
        _add_sitting(spent, sitting, rows, started)
        ended = rows[-1].wall_time
    return {name: seconds for name, seconds in spent.items() if seconds > 0}


def _add_sitting(spent: dict[str, float], sitting: Sitting, rows: Sequence[Row], started: float) -> None:
    lost = {id(row) for row in sitting.lost}
    last_time, last_iteration = started, rows[0].first - 1
    for number, row in enumerate(rows):
        wall = (row.wall_time or 0.0) - last_time
        if row.name:
            # Iterations before it that have no line yet stand in the next line's time.
            following = next((each for each in rows[number:] if not each.name), None)
            unlogged = (row.iteration - last_iteration) * _seconds(following) if following else 0.0
            spent["evaluation"] += max(0.0, wall - unlogged)
            last_time += max(0.0, wall - unlogged)
            continue
        inside = _seconds(row) * row.values.get("num_iterations", 1.0)
        spent["made again" if id(row) in lost else "training"] += inside
        spent["start-up" if last_time == started else "saving and other"] += max(0.0, wall - inside)
        last_time, last_iteration = last_time + wall, row.iteration


def _seconds(row: Row | None) -> float:
    seconds = 0.0 if row is None else row.values.get("iteration_time_ms", 0.0) / 1e3
    return seconds if math.isfinite(seconds) else 0.0


def tables(run: Run) -> Iterator[Table]:
    """What was slow, as far as the run left traces of it."""
    yield from _filled(
        "Slowest iterations",
        ("iteration", "ms", "times the median", "when (UTC)", "what it was"),
        _slowest(run),
    )
    yield from _filled(
        "Starts",
        ("from iteration", "when (UTC)", "down before", "logged again of the start before"),
        _starts(run.history),
    )
    yield from _filled(
        "Saves that are still there",
        ("iteration", "whole at (UTC)", "GB", "seconds since its iteration"),
        _saves(run),
    )
    yield from _filled("From its logs", ("file", "line"), _lines(run.logs))


def _filled(title: str, heads: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> Iterator[Table]:
    found = tuple(rows)
    if found:
        yield Table(title, heads, found)


def _slowest(run: Run) -> Iterator[tuple[str, ...]]:
    rows = [row for sitting in run.history.sittings for row in sitting.iterations if _seconds(row) > 0]
    if len(rows) < 2:
        return
    median = statistics.median(map(_seconds, rows))
    notes = dict(_notes(run))
    for row in sorted(rows, key=_seconds, reverse=True)[:NUM_SLOWEST]:
        which = str(row.iteration) if row.first == row.iteration else f"{row.first} to {row.iteration}"
        words = notes.get(id(row), "")
        yield (
            which,
            f"{_seconds(row) * 1e3:,.0f}",
            f"{_seconds(row) / median:.2f}",
            when(row.wall_time),
            words,
        )


def _notes(run: Run) -> Iterator[tuple[int, str]]:
    """What is known of a row beside its time."""
    saved = {checkpoint.iteration for checkpoint in run.checkpoints}
    for number, sitting in enumerate(run.history.sittings):
        evaluated = {row.iteration for row in sitting.evaluations}
        lost = {id(row) for row in sitting.lost}
        for row in sitting.iterations:
            words = []
            if row is sitting.iterations[0]:
                words.append("the first after a restart" if number else "the first")
            words += ["after an evaluation"] if row.first - 1 in evaluated else []
            words += ["after a save"] if row.first - 1 in saved else []
            words += [f"{skipped:.0f} skipped"] if (skipped := row.values.get("num_skipped", 0)) else []
            words += ["made again later"] if id(row) in lost else []
            yield id(row), ", ".join(words)


def _starts(history: History) -> Iterator[tuple[str, ...]]:
    for before, after in pairwise([None, *history.sittings]):
        assert after is not None
        first = after.rows[0]
        started = first.values.get("start_time")
        ended = before.rows[-1].wall_time if before else None
        down = "" if started is None or ended is None else _pause(started - ended)
        again = sum(row.iteration - row.first + 1 for row in before.lost) if before else 0
        yield str(first.first), when(started), down, f"{again} iterations" if again else ""


def _pause(seconds: float) -> str:
    return duration(seconds) if seconds >= 0 else f"none: the one before wrote for {duration(-seconds)} more"


def _saves(run: Run) -> Iterator[tuple[str, ...]]:
    rows = [row for sitting in run.history.sittings for row in sitting.rows]
    for checkpoint in run.checkpoints:
        # Of the lines of its iteration the last one before it was whole: an evaluation may come after it too.
        ends = [
            row.wall_time
            for row in rows
            if row.iteration == checkpoint.iteration
            and row.wall_time is not None
            and row.wall_time <= checkpoint.finished
        ]
        size = _size(checkpoint) / 1e9
        yield (
            str(checkpoint.iteration),
            when(checkpoint.finished),
            f"{size:,.0f}" if size >= 100 else f"{size:.3g}",
            f"{checkpoint.finished - max(ends):.1f}" if ends else "",
        )


def _size(checkpoint: Checkpoint) -> int:
    return sum(file.stat().st_size for file in checkpoint.folder.iterdir() if file.is_file())


def _lines(logs: Sequence[Path]) -> Iterator[tuple[str, ...]]:
    for log in logs:
        found: dict[str, None] = {}
        try:
            with log.open(encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    if _TELLING.search(line):
                        found.pop(line.strip(), None)
                        found[line.strip()] = None
        except OSError as error:
            raise UserError(f"log {log} cannot be read ({error.strerror})") from None
        for text in list(found)[-NUM_LINES:]:
            yield log.name, text[:400]


def when(seconds: float | None) -> str:
    """A time as people read it; empty where it is not known."""
    if seconds is None:
        return ""
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):  # no year of the calendar's
        return ""


def duration(seconds: float) -> str:
    """A length of time in its two largest units."""
    for unit, name, smaller, small_name in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if seconds >= unit:
            return f"{int(seconds // unit)} {name} {int(seconds % unit // smaller)} {small_name}"
    return f"{seconds:.1f} s"


def verdict(spent: Mapping[str, float]) -> str:
    """One line on where the time went."""
    whole = sum(spent.values())
    if not whole:
        return "the metrics file tells no wall-clock times"
    parts = ", ".join(
        f"{name} {seconds / whole:.0%}" for name, seconds in spent.items() if seconds >= 0.005 * whole
    )
    return f"{duration(whole)}: {parts}"
