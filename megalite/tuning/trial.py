"""One layout, run for some iterations: what was measured, or why there is nothing to measure."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import megalite
from megalite.config import CheckpointConfig, Config, LoggingConfig
from megalite.config.text import to_yaml
from megalite.tuning.ranks import Outcome, run_program

PROGRAM = Path(megalite.__file__).parents[1] / "pretrain_gpt.py"
DONE, OUT_OF_MEMORY, TIMED_OUT, FAILED = "done", "out of memory", "timed out", "failed"
_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|can't allocate memory|bad_alloc|MemoryError", re.IGNORECASE
)
_ERROR = re.compile(r"^(error: |\w*(\.\w+)*(Error|Exception|Interrupt)\b)")
_KILLED = -9
_MIB = 2.0**20


@dataclass(frozen=True)
class Trial:
    """What became of a layout.

    Attributes:
        status: one of the words above.
        reason: why it is not done; empty where it is.
        seconds: of an iteration, the median of those after the warm-up.
        memory_bytes: most that the reporting rank has reserved.
    """

    status: str
    reason: str = ""
    seconds: float | None = None
    tokens_per_second: float | None = None
    memory_bytes: float | None = None


@dataclass(frozen=True)
class Length:
    """How long a trial is.

    Attributes:
        warmup: iterations of `iterations` that are not measured.
        timeout: seconds for all, from the start of the processes.
    """

    iterations: int
    warmup: int
    timeout: float


def run_trial(
    config: Config, world_size: int, folder: Path, length: Length, program: Path = PROGRAM
) -> Trial:
    """Trains in this machine's own processes; leaves config, metrics and logs in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    file = folder / "config.yaml"
    file.write_text(to_yaml(trial_config(config, metrics, length)), encoding="utf-8")
    outcome = run_program([str(program), "--config", str(file)], world_size, folder, length.timeout)
    measured = _measured(metrics, length)
    if outcome.is_good and measured is not None:
        return measured
    return _failure(outcome, folder, length)


def trial_config(config: Config, metrics: Path, length: Length) -> Config:
    """The run's config, cut down to its iterations: no checkpoint is read or written, nothing is evaluated.

    The run's length stays what it is, so that its schedules do, and the run ends early. A ramp-up is left
    out: what is tuned is the full batch.
    """
    training = replace(
        config.training,
        exit_interval=length.iterations,
        eval_iters=0,
        rampup_batch_size=None,
        exit_duration_in_mins=None,
    )
    if training.train_iters is None and training.train_samples is None:
        training = replace(training, train_iters=length.iterations)
    return replace(
        config,
        training=training,
        checkpoint=CheckpointConfig(),
        logging=LoggingConfig(log_interval=1, metrics_file=str(metrics)),
    )


def _measured(metrics: Path, length: Length) -> Trial | None:
    """None where the run did not come through all of its iterations."""
    rows = [row for row in _rows(metrics) if row["iteration"] > length.warmup]
    if not rows or rows[-1]["iteration"] < length.iterations:
        return None
    seconds = statistics.median(row["iteration_time_ms"] for row in rows) / 1e3
    tokens = statistics.median(row["tokens_per_second"] for row in rows)
    memory = max(row["memory_reserved_mb"] for row in rows) * _MIB
    return Trial(DONE, "", seconds, tokens, memory)


def _rows(metrics: Path) -> Iterator[dict[str, Any]]:
    if not metrics.exists():
        return
    for line in metrics.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if "iteration" in record:
            yield record


def _failure(outcome: Outcome, folder: Path, length: Length) -> Trial:
    words = [line for log in sorted(folder.glob("rank_*.log")) for line in _lines(log)]
    if memory := [line for line in words if _MEMORY.search(line)]:
        # The error's own line rather than the code above it in a traceback.
        return Trial(OUT_OF_MEMORY, next(filter(_ERROR.match, memory), memory[-1]))
    if outcome.timed_out:
        return Trial(TIMED_OUT, f"not done after {length.timeout:g} s")
    if _KILLED in outcome.statuses:
        rank = outcome.statuses.index(_KILLED)
        return Trial(OUT_OF_MEMORY, f"rank {rank} was killed, as the kernel does where memory runs out")
    first = next((line for line in words if line.startswith("error: ")), None)
    last = next((line for line in reversed(words) if _ERROR.match(line)), None)
    statuses = ", ".join(str(status) for status in outcome.statuses)
    return Trial(FAILED, first or last or f"statuses {statuses}: see {folder}")


def _lines(log: Path) -> list[str]:
    return [
        line.strip()
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ]
