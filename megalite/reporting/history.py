"""A run's figures in the order in which they were made, with its restarts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalite.errors import UserError
from megalite.parsing import parse_json

_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""How a metrics file spells the floats that JSON has no numbers for."""
_MAX_ITERATION = 2**53
"""Above it floats leave out whole numbers."""
_SMALLEST, _LARGEST = 1e-100, 1e100
"""Figures below are read as 0, and above as infinite: ratios of the others stay within a float's range."""
_COUNTED = {"num_iterations", "train_iters", "consumed_samples", "consumed_tokens", "start_time", "wall_time"}
"""Figures that place a line among the others: one that is not finite is as good as none."""


@dataclass(frozen=True)
class Row:
    """One logged iteration or evaluation.

    Attributes:
        values: by the metrics file's names; what the line does not tell is missing.
        name: of an evaluation: its split and dataset; empty for an iteration.
    """

    iteration: int
    values: Mapping[str, float]
    name: str = ""

    @property
    def first(self) -> int:
        """The first iteration that it stands for."""
        return self.iteration - int(self.values.get("num_iterations", 1)) + 1

    @property
    def wall_time(self) -> float | None:
        """When it was written, in seconds since 1970; old files do not tell it."""
        return self.values.get("wall_time")


@dataclass
class Sitting:
    """What the run logged from one of its starts to the next.

    Attributes:
        num_kept: iterations' rows that stand; those behind them were lost, and made again by a later sitting.
    """

    iterations: list[Row] = field(default_factory=list)
    evaluations: list[Row] = field(default_factory=list)
    num_kept: int = 0

    @property
    def kept(self) -> list[Row]:
        return self.iterations[: self.num_kept]

    @property
    def lost(self) -> list[Row]:
        return self.iterations[self.num_kept :]

    @property
    def rows(self) -> list[Row]:
        """Iterations and evaluations in the order in which they were written."""
        return sorted([*self.iterations, *self.evaluations], key=lambda row: (row.iteration, bool(row.name)))


@dataclass
class History:
    """All that a run logged.

    Attributes:
        num_broken: lines that were no whole record, as a killed run or a full disk leaves them.
    """

    sittings: list[Sitting]
    num_broken: int = 0

    @property
    def iterations(self) -> list[Row]:
        """Those that count: of an iteration that was run again the later row."""
        return [row for sitting in self.sittings for row in sitting.kept]

    @property
    def evaluations(self) -> list[Row]:
        """Those that count, likewise."""
        found = {(row.name, row.iteration): row for sitting in self.sittings for row in sitting.evaluations}
        return sorted(found.values(), key=lambda row: row.iteration)


def read_history(file: Path) -> History:
    """Reads a metrics file.

    Raises:
        UserError: it cannot be read, or holds no record.
    """
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise UserError(f"metrics file {file} cannot be read ({error.strerror})") from None
    rows, num_broken = list[Row](), 0
    for line in filter(str.strip, lines):
        row = _row(line)
        if row is None:
            num_broken += 1
        else:
            rows.append(row)
    if not any(not row.name for row in rows):
        raise UserError(
            f"{file} holds no iteration's figures: give the file of --metrics-file, one JSON object a line"
        )
    return History(sittings_of(rows), num_broken)


def sittings_of(rows: Iterable[Row]) -> list[Sitting]:
    """Deals rows to the process that wrote each: by its start time, or else where the iterations go back.

    A process that outlives its launcher goes on writing beside the one that took its place: it is the earlier
    one, and what both made counts as the later one made it.
    """
    found: dict[float, Sitting] = {}
    last: Row | None = None
    number = 0
    for row in rows:
        number += last is not None and _goes_back(last, row)
        sitting = found.setdefault(row.values.get("start_time", float(number)), Sitting())
        (sitting.evaluations if row.name else sitting.iterations).append(row)
        last = row
    sittings = [found[key] for key in sorted(found)]
    end = math.inf
    for sitting in reversed(sittings):
        sitting.num_kept = sum(row.iteration < end for row in sitting.iterations)
        sitting.evaluations = [row for row in sitting.evaluations if row.iteration < end]
        end = min([end, *(row.first for row in sitting.iterations)])
    return [sitting for sitting in sittings if sitting.rows]


def _goes_back(last: Row, row: Row) -> bool:
    # An iteration's own evaluation comes behind it.
    return row.iteration < last.iteration or (row.iteration == last.iteration and not row.name)


def _row(line: str) -> Row | None:
    """None where the line is no whole record."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    told, name = record, ""
    if isinstance(validation := record.get("validation"), dict):
        told = {**record, **validation}
        split = str(validation.get("split", "valid"))
        name = f"{split} {validation['name']}" if validation.get("name") else split
    iteration = told.get("iteration")
    if type(iteration) is not int or not 0 <= iteration <= _MAX_ITERATION:
        return None
    return Row(iteration, dict(_numbers(told)), name)


def _numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in record.items():
        number = _WORDS.get(value, value) if isinstance(value, str) else value
        if not isinstance(number, int | float):  # bool is one too
            continue
        try:
            told = float(number)
        except OverflowError:  # of a whole number; a float of that size has been read as infinite
            told = math.inf if number > 0 else -math.inf
        if abs(told) < _SMALLEST:
            told = 0.0
        elif abs(told) > _LARGEST:
            told = math.copysign(math.inf, told)
        if math.isfinite(told) or key not in _COUNTED:
            yield key, told
