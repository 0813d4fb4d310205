"""A run's figures as JSON Lines, for programs to read."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

from megalite.train.telemetry.metrics import IterationMetrics, ValidationMetrics
from megalite.train.telemetry.output_file import OutputFile
from megalite.train.telemetry.timer_table import TimesOfRanks


class MetricsFile:
    """Appends one JSON object a line: an iteration's figures, or ``{"validation": {...}}``.

    Floats keep their full precision; as JSON knows no others, those that are not finite are the strings
    "NaN", "Infinity" and "-Infinity". `wall_time` is when the line was written and `start_time` when its
    process began to write, both in seconds since 1970 by this host's clock, which tells restarts and pauses.
    Each line is on its way to the disk before the next iteration starts, or held where the disk is full (see
    `OutputFile`). Lines of an earlier run are kept, so
    a resumed run goes on in the same file; an iteration that is run again after an unsaved end stands there
    twice, and the later line counts.

    Raises:
        UserError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._start = time.time()
        self._file = OutputFile(path, "--metrics-file")
        if _ends_in_broken_line(path):
            self._file.write(b"\n")  # else what a killed run left half-written spoils the first line

    def iteration(self, metrics: IterationMetrics, times: TimesOfRanks) -> None:
        record = dataclasses.asdict(metrics)
        del record["warnings"]  # words for the log; num_nan and num_skipped say it here
        for name in ("params_norm", "num_zeros"):
            if record[name] is None:  # not asked for, or there is none
                del record[name]
        self._write(record)

    def validation(self, metrics: ValidationMetrics) -> None:
        record = dataclasses.asdict(metrics) | {"ppl": metrics.ppl}
        if not metrics.name:
            del record["name"]
        self._write({"validation": record})

    def close(self, *, has_failed: bool = False) -> None:
        self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        # In one write, so that a reader never sees half a line.
        timed = record | {"start_time": self._start, "wall_time": time.time()}
        self._file.write(json.dumps(_spelled(timed), allow_nan=False).encode() + b"\n")
        self._file.flush()


def _ends_in_broken_line(path: Path) -> bool:
    """Return whether the file has an end that is no line's end."""
    with path.open("rb") as file:
        if file.seek(0, 2) == 0:
            return False
        file.seek(-1, 2)
        return file.read(1) != b"\n"


def _spelled(value: Any) -> Any:
    """The value with floats that are not finite spelled out."""
    if isinstance(value, dict):
        return {key: _spelled(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
