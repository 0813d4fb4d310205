"""Results of checks (measured, expected, verdict), as lines of JSON and as a table."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Verdict = Literal["ok", "low", "failed", "skipped", "skipped (time)", "info"]
"""low: slower than expected; info: nothing is expected; skipped: cannot run here, detail says why; skipped
(time): not run or not finished, for time."""
Value = float | str | None


@dataclass(frozen=True)
class Result:
    """One row of the table.

    Attributes:
        detail: one line: the reason of a verdict, or what else was seen.
    """

    name: str
    measured: Value
    expected: Value
    unit: str
    verdict: Verdict
    detail: str = ""

    def to_json(self) -> str:
        """Return the result as one line."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(line: str) -> Result:
        """Return the result of such a line."""
        return Result(**json.loads(line))


def info(name: str, measured: Value, unit: str = "", detail: str = "") -> Result:
    """Return a value without an expectation."""
    return Result(name, measured, None, unit, "info", detail)


def skipped(name: str, reason: str) -> Result:
    """Return that something cannot run here."""
    return Result(name, None, None, "", "skipped", _line(reason))


def cut(name: str, reason: str) -> Result:
    """Return that the time was over before the end."""
    return Result(name, None, None, "", "skipped (time)", _line(reason))


def is_cut(result: Result) -> bool:
    """Return whether time cut a result off."""
    return result.verdict == "skipped (time)"


def failed(name: str, reason: str) -> Result:
    """Return that something went wrong."""
    return Result(name, None, None, "", "failed", _line(reason))


def passed(name: str, is_right: bool, measured: Value, expected: Value, detail: str = "") -> Result:
    """Return whether something is right."""
    return Result(name, measured, expected, "", "ok" if is_right else "failed", _line(detail))


def at_most(name: str, measured: float, limit: float, unit: str = "", detail: str = "") -> Result:
    """Return whether an error is within its limit; NaN is not."""
    return Result(name, measured, limit, unit, "ok" if measured <= limit else "failed", _line(detail))


def rate(
    name: str, measured: float, expected: float | None, unit: str, share: float = 0.9, detail: str = ""
) -> Result:
    """Compare a rate, of which more is better, with what is expected.

    Args:
        share: share of the expected rate from which the verdict is ok.
    """
    if expected is None:
        return info(name, measured, unit, detail)
    return Result(name, measured, expected, unit, "ok" if measured >= share * expected else "low", detail)


def duration(
    name: str, measured: float, expected: float | None, unit: str, share: float = 0.9, detail: str = ""
) -> Result:
    """Compare a time, of which less is better; `share` as in `rate`."""
    if expected is None:
        return info(name, measured, unit, detail)
    return Result(name, measured, expected, unit, "ok" if measured * share <= expected else "low", detail)


def _line(text: str) -> str:
    return " ".join(text.split())[:400]


HEADS = ("check", "measured", "expected", "unit", "verdict")


def table(results: Sequence[Result], most: int | None = None) -> str:
    """Return the table, and a last line that counts the verdicts.

    Args:
        most: number of characters of a row's detail; None for all.
    """
    rows = [HEADS, *((r.name, _shown(r.measured), _shown(r.expected), r.unit, r.verdict) for r in results)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADS))]
    lines = []
    for row, detail in zip(rows, ["", *(r.detail[:most] for r in results)], strict=True):
        cells = [
            f"{cell:>{width}}" if i in (1, 2) else f"{cell:<{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join([*cells, detail]).rstrip())
    return "\n".join([*lines, counted(results)])


def counted(results: Sequence[Result]) -> str:
    """Return how many results passed, failed and were skipped; slow ones pass."""
    count = Counter(result.verdict for result in results)
    slow = f" ({count['low']} slower than expected)" if count["low"] else ""
    for_time = f" ({count['skipped (time)']} for time)" if count["skipped (time)"] else ""
    return (
        f"{count['ok'] + count['low']} passed{slow}, {count['failed']} failed, "
        f"{count['skipped'] + count['skipped (time)']} skipped{for_time}"
    )


def _shown(value: Value) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.4g}"


def needs_attention(result: Result) -> bool:
    """Return whether a reader wants to see a result at once."""
    return result.verdict == "failed" or is_cut(result)


def has_failed(results: Iterable[Result]) -> bool:
    """Return whether a check failed; slow or skipped checks do not count."""
    return any(result.verdict == "failed" for result in results)
