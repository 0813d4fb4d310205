"""Run the checks of a stage, each in a process of its own with a time limit, and go on after a failure.

A check that crashes the CUDA context, hangs or is killed thus costs its own results only: those that it
reported before are kept.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from benchmarks.gpu_check.results import Result, failed, table

ROOT = Path(__file__).parents[2]
STAGE_SECONDS = 540.0
"""Time limit of a stage in seconds."""
SECONDS_TO_END = 8.0
"""Between the request to end and the kill: programs such as torchrun end their own processes first."""


@dataclass(frozen=True)
class CheckContext:
    """Describes where a check runs.

    Attributes:
        device: cuda, or cpu to rehearse the check.
        is_small: use sizes that a CPU computes in seconds; then measurements are meaningless.
        scratch: an empty folder.
    """

    device: str
    is_small: bool
    scratch: Path


@dataclass(frozen=True)
class Check:
    """Describes one check.

    Attributes:
        function: its module here and its name; it takes a `CheckContext` and yields results as it finds them.
            By name, because the check that builds the extensions must not import what needs them.
        seconds: its time limit.
    """

    name: str
    function: str
    seconds: float


@dataclass(frozen=True)
class Stage:
    """Describes checks that run one after the other."""

    number: int
    title: str
    checks: Sequence[Check]


def worker_command(check: Check, context: CheckContext, results: Path) -> list[str]:
    """Return the command of a check's process."""
    command = [sys.executable, "-m", "benchmarks.gpu_check.worker", check.name, context.device]
    return [*command, str(context.scratch), str(results), *(["small"] if context.is_small else [])]


Command = Callable[[Check, CheckContext, Path], Sequence[str]]


def run_stage(
    stage: Stage,
    out: Path,
    device: str,
    is_small: bool,
    *,
    limit: float = STAGE_SECONDS,
    command: Command = worker_command,
) -> list[Result]:
    """Run a stage; write ``stage_N.json`` after each check, and ``stage_N.log``.

    Args:
        limit: seconds of the stage; checks that have no time left are reported as failed.
        command: starts a check's process.
    """
    start, results = time.monotonic(), []
    with (out / f"stage_{stage.number}.log").open("w", encoding="utf-8") as log:
        for check in stage.checks:
            left = limit - SECONDS_TO_END - (time.monotonic() - start)
            seconds = min(check.seconds, left)
            if seconds <= 0:
                results.append(failed(check.name, f"not run: the stage's {limit:.0f} s are over"))
                continue
            print(f"stage {stage.number}: {check.name}", flush=True)
            with tempfile.TemporaryDirectory(prefix="check-gpu-") as folder:
                context = CheckContext(device, is_small, Path(folder) / "scratch")
                context.scratch.mkdir()
                log.write(f"\n=== {check.name} (at most {seconds:.0f} s)\n")
                log.flush()
                began = time.monotonic()
                found = run_check(check, context, command, seconds, log)
                log.write(f"--- {time.monotonic() - began:.1f} s\n{table(found)}\n")
            results += found
            _write_json(stage, out, device, time.monotonic() - start, results)
        log.write(f"\n=== stage {stage.number}: {stage.title}\n{table(results)}\n")
    _write_json(stage, out, device, time.monotonic() - start, results)
    return results


def run_check(
    check: Check, context: CheckContext, command: Command, seconds: float, log: IO[str]
) -> list[Result]:
    """Run a check's process; what it writes to its outputs goes to the log."""
    file = context.scratch.parent / "results.jsonl"
    file.touch()
    position = log.tell()
    process = subprocess.Popen(
        command(check, context, file),
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # so that all that it starts can be ended with it
    )
    problem = ""
    try:
        if status := process.wait(seconds):
            problem = f"its process ended with status {status}: {_last_line(Path(log.name), position)}"
    except subprocess.TimeoutExpired:
        problem = f"not finished after {seconds:.0f} s: {_last_line(Path(log.name), position)}"
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_END)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    log.seek(0, os.SEEK_END)
    results = [Result.from_json(line) for line in file.read_text(encoding="utf-8").splitlines()]
    if not problem and not results:
        problem = "it reported nothing"
    return [*results, failed(check.name, problem)] if problem else results


def _last_line(log: Path, position: int) -> str:
    with log.open("rb") as file:
        file.seek(position)
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


def _write_json(stage: Stage, out: Path, device: str, seconds: float, results: Sequence[Result]) -> None:
    content = {
        "stage": stage.number,
        "title": stage.title,
        "device": device,
        "seconds": round(seconds, 1),
        "results": [asdict(result) for result in results],
    }
    (out / f"stage_{stage.number}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
