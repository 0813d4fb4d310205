"""Run a trial of one layout for some iterations, and keep results in a file so that tuning can resume."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megalite.config import CheckpointConfig, Config, LoggingConfig
from megalite.config.fields import with_fields
from megalite.config.yaml_file import to_yaml
from megalite.utils.errors import UserError
from megalite.utils.files import parse_json, replace_file

FILE = "results.json"


class Results:
    """Trials by layout, in a file that is written after each trial.

    Args:
        folder: folder for the results.
        about: settings that all trials have in common; results with other settings are rejected.

    Raises:
        UserError: the folder holds results with other settings, or cannot be read or written.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        self._file = folder / FILE
        self._about = json.loads(json.dumps(about))
        self._trials: dict[str, Trial] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self._file.exists():
                self._read()
        except OSError as error:
            raise UserError(f"--folder {folder} cannot be used ({error.strerror}): pass another") from None

    def __len__(self) -> int:
        return len(self._trials)

    def get(self, layout: str) -> Trial | None:
        """Return the trial of a layout; None if there is none yet."""
        return self._trials.get(layout)

    def add(self, layout: str, trial: Trial) -> None:
        """Add a trial; the file is replaced atomically."""
        self._trials[layout] = trial
        record = {
            "about": self._about,
            "trials": [{"layout": name, **asdict(each)} for name, each in self._trials.items()],
        }
        with replace_file(self._file) as stream:
            stream.write(json.dumps(record, indent=1).encode())

    def _read(self) -> None:
        try:
            record = parse_json(self._file.read_text(encoding="utf-8"))
            about, trials = dict(record["about"]), record["trials"]
            found = {each.pop("layout"): Trial(**each) for each in trials}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(
                f"{self._file} is not a results file: pass another --folder, or delete it"
            ) from None
        if about != self._about:
            changed = ", ".join(name for name in self._about if about.get(name) != self._about[name])
            raise UserError(
                f"{self._file} holds the results of another tuning ({changed} changed): pass another "
                "--folder, or delete it"
            )
        self._trials = found


DONE, OUT_OF_MEMORY, TIMED_OUT, FAILED = "done", "out of memory", "timed out", "failed"
_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|can't allocate memory|bad_alloc|MemoryError", re.IGNORECASE
)
_ERROR = re.compile(r"^(error: |\w*(\.\w+)*(Error|Exception|Interrupt)\b)")
_KILLED = -9
_MIB = 2.0**20


@dataclass(frozen=True)
class Trial:
    """Result of a trial.

    Attributes:
        status: DONE, OUT_OF_MEMORY, TIMED_OUT or FAILED.
        reason: why the trial failed; empty if it is done.
        seconds: median seconds per iteration after the warm-up.
        memory_bytes: maximum memory that the reporting rank reserved.
    """

    status: str
    reason: str = ""
    seconds: float | None = None
    tokens_per_second: float | None = None
    memory_bytes: float | None = None


@dataclass(frozen=True)
class Length:
    """Length of a trial.

    Attributes:
        warmup: how many of the `iterations` are not measured.
        timeout: seconds for the whole trial, from the start of the processes.
    """

    iterations: int
    warmup: int
    timeout: float


def run_trial(config: Config, world_size: int, folder: Path, length: Length, program: Sequence[str]) -> Trial:
    """Train with a layout on this machine; config, metrics and logs stay in the folder.

    Args:
        program: arguments to Python that run the training program.
    """
    folder.mkdir(parents=True, exist_ok=True)
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    file = folder / "config.yaml"
    file.write_text(to_yaml(trial_config(config, metrics, length)), encoding="utf-8")
    outcome = run_program([*program, "--config", str(file)], world_size, folder, length.timeout)
    measured = read_measured(metrics, length)
    if outcome.is_good and measured is not None:
        return measured
    return _failure(outcome, folder, length)


def trial_config(config: Config, metrics: Path, length: Length) -> Config:
    """Return the config of a trial: it has no checkpoints and no evaluation, and exits after its iterations.

    The run keeps its length, and with it its schedules, but exits early. A batch-size ramp-up or schedule is
    removed, because the layout is tuned for the full batch.
    """
    if config.training.train_iters is None and config.training.train_samples is None:
        config = with_fields(config, train_iters=length.iterations)
    logging = LoggingConfig(log_interval=1, metrics_file=str(metrics))
    return with_fields(
        replace(config, checkpoint=CheckpointConfig(), logging=logging),
        exit_interval=length.iterations,
        eval_iters=0,
        rampup_batch_size=None,
        step_batch_size_schedule=None,
        exit_duration_in_mins=None,
    )


def read_measured(metrics: Path, length: Length) -> Trial | None:
    """Return the measurements; None if the run did not finish its iterations."""
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
        try:
            record = parse_json(line)
        except ValueError:  # a killed run can leave a part of a line
            return
        if "iteration" in record:
            yield record


def _failure(outcome: Outcome, folder: Path, length: Length) -> Trial:
    lines = [line for log in sorted(folder.glob("rank_*.log")) for line in _lines(log)]
    if memory := [line for line in lines if _MEMORY.search(line)]:
        # Prefer the error's own line to lines of code in its traceback.
        return Trial(OUT_OF_MEMORY, next(filter(_ERROR.match, memory), memory[-1]))
    if outcome.timed_out:
        return Trial(TIMED_OUT, f"not done after {length.timeout:g} s")
    if _KILLED in outcome.statuses:
        rank = outcome.statuses.index(_KILLED)
        return Trial(OUT_OF_MEMORY, f"rank {rank} was killed, as the system does when memory runs out")
    first = next((line for line in lines if line.startswith("error: ")), None)
    last = next((line for line in reversed(lines) if _ERROR.match(line)), None)
    statuses = ", ".join(str(status) for status in outcome.statuses)
    return Trial(FAILED, first or last or f"exit statuses {statuses}: see {folder}")


def _lines(log: Path) -> list[str]:
    return [
        line.strip()
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.strip()
    ]


GRACE_SECONDS = 15.0
"""Time for the other ranks to report after one has failed, and for each to end after a signal."""
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Outcome:
    """End of the ranks of a run.

    Attributes:
        statuses: exit status of each rank, as in `subprocess`; None if it had to be killed.
        timed_out: whether the ranks did not finish in time.
    """

    statuses: tuple[int | None, ...]
    timed_out: bool

    @property
    def is_good(self) -> bool:
        return not self.timed_out and not any(status != 0 for status in self.statuses)


def run_program(command: Sequence[str], num_ranks: int, folder: Path, timeout: float) -> Outcome:
    """Start `command` once per rank, with the environment that torchrun would set, and wait.

    No rank outlives the call, however it ends. Each rank's output goes to ``folder/rank_N.log``.

    Args:
        timeout: seconds until the ranks are killed.
    """
    with _started(command, num_ranks, folder) as ranks:
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            statuses = [rank.poll() for rank in ranks]
            if None not in statuses:
                return Outcome(tuple(statuses), timed_out=False)
            if any(statuses):
                _wait(ranks, GRACE_SECONDS)
                return Outcome(tuple(rank.poll() for rank in ranks), timed_out=False)
            time.sleep(_POLL_SECONDS)
        return Outcome(tuple(rank.poll() for rank in ranks), timed_out=True)


@contextmanager
def _started(command: Sequence[str], num_ranks: int, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    ranks: list[subprocess.Popen[bytes]] = []
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    try:
        for number in range(num_ranks):
            sizes = {
                "WORLD_SIZE": num_ranks,
                "LOCAL_WORLD_SIZE": num_ranks,
                "RANK": number,
                "LOCAL_RANK": number,
            }
            with (folder / f"rank_{number}.log").open("wb") as log:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, *command],
                        env={**os.environ, **rendezvous, **{name: str(size) for name, size in sizes.items()}},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # so that its children can be killed with it
                    )
                )
        yield ranks
    finally:
        for sent in (signal.SIGTERM, signal.SIGKILL):
            for rank in ranks:
                with suppress(ProcessLookupError):
                    os.killpg(rank.pid, sent)  # the whole group: children of a rank may outlive it
            _wait(ranks, GRACE_SECONDS)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    end = time.monotonic() + seconds
    for rank in ranks:
        try:
            rank.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            continue


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
