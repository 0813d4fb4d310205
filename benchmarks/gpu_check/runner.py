"""Run the checks of a stage, each in a process of its own with a time limit, and go on after a failure.

A check that crashes the CUDA context, hangs or is killed thus costs its own results only: those that it
reported before are kept.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from benchmarks.gpu_check.results import Result, counted, cut, failed, info, is_cut, needs_attention, table

ROOT = Path(__file__).parents[2]
STAGE_SECONDS = 420.0
"""Limit of a stage's checks in seconds, without what is built and compiled before them."""
COMMAND_SECONDS = 590.0
"""Limit of a stage with what is built and compiled before it: machines are lent for 10 minutes a command."""
SECONDS_TO_END = 8.0
"""Between the request to end and the kill: programs such as torchrun end their own processes first."""


@dataclass(frozen=True)
class CheckContext:
    """Describes where a check runs.

    Attributes:
        device: cuda, or cpu to rehearse the check.
        is_small: use sizes that a CPU computes in seconds; then measurements are meaningless.
        scratch: an empty folder.
        nccl: a library of NCCL to use instead of torch's; None for torch's.
        done: names of the results that this check has reported in an earlier command, when time cut it off.
            A check of many rows goes on after them.
    """

    device: str
    is_small: bool
    scratch: Path
    nccl: Path | None = None
    done: frozenset[str] = frozenset()


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
    """Describes checks that run one after the other.

    Attributes:
        builds: what is built or compiled before the checks, once per command. Its time does not count as
            theirs.
    """

    number: int
    title: str
    checks: Sequence[Check]
    builds: Sequence[Check] = ()

    @property
    def seconds(self) -> float:
        """Return the longest time of the checks together."""
        return sum(check.seconds for check in self.checks)


@dataclass
class Finished:
    """Holds what a check has reported.

    Attributes:
        is_whole: whether the check came to its end, be it with failures; False if time cut it off.
    """

    name: str
    seconds: float
    is_whole: bool
    results: list[Result] = field(default_factory=list)


def worker_command(check: Check, context: CheckContext, results: Path) -> list[str]:
    """Return the command of a check's process, which reads the context from a file."""
    file = results.with_name("context.pickle")
    file.write_bytes(pickle.dumps(context))
    return [sys.executable, "-m", "benchmarks.gpu_check.worker", check.name, str(file), str(results)]


Command = Callable[[Check, CheckContext, Path], Sequence[str]]


class StageRunner:
    """Runs stages in one command.

    Args:
        out: folder of ``stage_N.json``, written after each check, and ``stage_N.log``.
        device: cuda, or cpu to rehearse.
        machine: the machine in words; results of another one are not kept.
        end: time of `time.monotonic` at which the command must have ended; None for no limit.
        resumes: keep the results of checks that came to their end in an earlier command, and those that other
            checks had reported when time cut them off.
        nccl: see `CheckContext`.
        command: starts a check's process.
    """

    def __init__(
        self,
        out: Path,
        device: str,
        machine: str,
        is_small: bool,
        *,
        end: float | None = None,
        resumes: bool = False,
        nccl: Path | None = None,
        command: Command = worker_command,
    ) -> None:
        self._out = out
        self._device = device
        self._machine = machine
        self._is_small = is_small
        self._end = float("inf") if end is None else end
        self._resumes = resumes
        self._nccl = nccl
        self._command = command
        self._built: set[str] = set()

    @property
    def seconds_left(self) -> float:
        """Return the seconds until the command must have ended."""
        return self._end - time.monotonic()

    def run(self, stage: Stage, limit: float = STAGE_SECONDS) -> list[Result]:
        """Run a stage and return all its results.

        Args:
            limit: seconds of the checks; what they cut off is reported as skipped.
        """
        earlier = load_stage(self._out, stage, self._machine) if self._resumes else []
        kept = {each.name: each for each in earlier if each.is_whole}
        unfinished = {each.name: each.results for each in earlier if not each.is_whole}
        finished: list[Finished] = []
        to_run = [check for check in stage.checks if check.name not in kept]
        # Builds are fast if they were done before, and later checks need them.
        to_build = [check for check in stage.builds if check.name not in self._built and to_run]
        mode = "a" if kept else "w"
        with (self._out / f"stage_{stage.number}.log").open(mode, encoding="utf-8") as log:
            command_end = min(self._end, time.monotonic() + COMMAND_SECONDS)
            for check in to_build:
                done = self._run(stage, check, command_end, log, [])
                done.results.append(
                    info(f"{check.name}: time", done.seconds, "s", "not counted as the stage's")
                )
                finished.append(done)
                self._built.add(check.name)
            end = min(command_end, time.monotonic() + limit)
            for check in stage.checks:
                before = unfinished.get(check.name, [])
                finished.append(kept.get(check.name) or self._run(stage, check, end, log, before))
                self._write_json(stage, finished)
            results = [result for each in finished for result in each.results]
            log.write(f"\n=== stage {stage.number}: {stage.title}\n{table(results)}\n")
        self._write_json(stage, finished)
        return results

    def _run(
        self, stage: Stage, check: Check, end: float, log: IO[str], earlier: Sequence[Result]
    ) -> Finished:
        reported = [result for result in earlier if not is_cut(result)]
        left = end - SECONDS_TO_END - time.monotonic()
        seconds = min(check.seconds, left)
        title = f"stage {stage.number}: {check.name}"
        if seconds <= 0:
            print(f"{title}: no time left", flush=True)
            over = cut(check.name, "not run: the time was over")
            return Finished(check.name, 0.0, False, [*reported, over])
        print(f"{title} …", flush=True)
        with tempfile.TemporaryDirectory(prefix="check-gpu-") as folder:
            scratch, names = Path(folder) / "scratch", frozenset(result.name for result in reported)
            context = CheckContext(self._device, self._is_small, scratch, self._nccl, names)
            context.scratch.mkdir()
            log.write(f"\n=== {check.name} (at most {seconds:.0f} s)\n")
            log.flush()
            began = time.monotonic()
            results, is_whole = run_check(check, context, self._command, seconds, log)
            again = {result.name for result in results}
            results = [*(result for result in reported if result.name not in again), *results]
            taken = time.monotonic() - began
            log.write(f"--- {taken:.1f} s\n{table(results)}\n")
        print(f"{title}: {counted(results)} in {taken:.0f} s", flush=True)
        for result in filter(needs_attention, results):
            print(f"  {result.verdict}: {result.name}: {result.detail}", flush=True)
        return Finished(check.name, round(taken, 1), is_whole, results)

    def _write_json(self, stage: Stage, finished: Sequence[Finished]) -> None:
        content = {
            "stage": stage.number,
            "title": stage.title,
            "machine": self._machine,
            "checks": [asdict(each) for each in finished],
        }
        _json_file(self._out, stage).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def run_check(
    check: Check, context: CheckContext, command: Command, seconds: float, log: IO[str]
) -> tuple[list[Result], bool]:
    """Run a check's process; what it writes to its outputs goes to the log.

    Returns:
        Its results, and whether it came to its end in time.
    """
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
    problem, text = "", None
    try:
        if status := process.wait(seconds):
            problem = f"its process ended with status {status}: {_last_line(Path(log.name), position)}"
    except subprocess.TimeoutExpired:
        text = file.read_text(encoding="utf-8")  # before the programs are ended, which makes them fail
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
    is_whole = text is None
    text = file.read_text(encoding="utf-8") if text is None else text
    results = [Result.from_json(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    if not is_whole:
        results.append(cut(check.name, problem))
    elif problem or not results:
        results.append(failed(check.name, problem or "it reported nothing"))
    return results, is_whole


def _last_line(log: Path, position: int) -> str:
    with log.open("rb") as file:
        file.seek(position)
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


def _json_file(out: Path, stage: Stage) -> Path:
    return out / f"stage_{stage.number}.json"


def load_stage(out: Path, stage: Stage, machine: str) -> list[Finished]:
    """Return the checks of a stage that were run on a machine, from the folder; empty if none was."""
    file = _json_file(out, stage)
    content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if content.get("machine") != machine:
        return []
    return [
        Finished(**{**each, "results": [Result(**result) for result in each["results"]]})
        for each in content["checks"]
    ]


def is_complete(out: Path, stage: Stage, machine: str) -> bool:
    """Return whether all checks of a stage came to their end."""
    whole = {each.name for each in load_stage(out, stage, machine) if each.is_whole}
    return all(check.name in whole for check in stage.checks)
