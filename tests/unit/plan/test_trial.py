"""Trials: small programs that end in every way that training does, and the file of their results."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megalite.config import Config
from megalite.plan.trial import (
    DONE,
    FAILED,
    FILE,
    OUT_OF_MEMORY,
    TIMED_OUT,
    Length,
    Results,
    Trial,
    run_trial,
    trial_config,
)
from megalite.utils.errors import UserError
from tests.run_folder import iteration

LENGTH = Length(iterations=4, warmup=1, timeout=60.0)
FOREVER = "import time\nwhile True: time.sleep(0.1)\n"


def _run(tmp_path: Path, source: str, length: Length = LENGTH) -> Trial:
    program = tmp_path / "program.py"
    program.write_text(
        f"import os, sys\nrank, folder = int(os.environ['RANK']), {str(tmp_path / 'trial')!r}\n{source}"
    )
    return run_trial(Config(), 2, tmp_path / "trial", length, [str(program)])


def _writes(times_ms: list[float]) -> str:
    """Return the source of a program whose rank 1 writes these iterations' metrics."""
    lines = [
        json.dumps(iteration(number, 0.0, 0.0, iteration_time_ms=each, tokens_per_second=1e6 / each))
        for number, each in enumerate(times_ms, 1)
    ]
    return f"if rank == 1: open(folder + '/metrics.jsonl', 'w').write({chr(10).join(lines)!r})\n"


def test_the_median_after_the_warm_up_counts(tmp_path: Path) -> None:
    trial = _run(tmp_path, _writes([9000.0, 100.0, 400.0, 200.0]))
    assert (trial.status, trial.seconds, trial.tokens_per_second) == (DONE, 0.2, 5000.0)
    assert trial.memory_bytes == 40_000 * 2**20


def test_a_run_that_ended_early_has_no_figure(tmp_path: Path) -> None:
    trial = _run(tmp_path, _writes([100.0, 100.0]))
    assert (trial.status, trial.seconds) == (FAILED, None)


@pytest.mark.parametrize(
    ("source", "status", "reason"),
    [
        (
            "raise MemoryError('CUDA out of memory. Tried 3 GiB')",
            OUT_OF_MEMORY,
            "MemoryError: CUDA out of memory. Tried 3 GiB",
        ),
        (
            "os.kill(os.getpid(), 9)",
            OUT_OF_MEMORY,
            "rank 0 was killed, as the system does when memory runs out",
        ),
        ("sys.exit('error: --tp 2 does not divide 3')", FAILED, "error: --tp 2 does not divide 3"),
        ("raise KeyError('x')", FAILED, "KeyError: 'x'"),
        ("sys.exit(75)", FAILED, "exit statuses 75, 75: see "),
    ],
)
def test_failures_are_named(tmp_path: Path, source: str, status: str, reason: str) -> None:
    trial = _run(tmp_path, source)
    assert trial.status == status
    assert trial.reason.startswith(reason)


def test_ranks_that_wait_for_a_dead_one_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that rank 0, which ignores SIGTERM, and its child are killed."""
    monkeypatch.setattr("megalite.plan.trial.GRACE_SECONDS", 0.3)
    source = (
        "import signal, subprocess\n"
        "if rank == 1:\n"
        "    while not os.path.exists(folder + '/ready'): pass\n"
        "    sys.exit('error: gone')\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        "open(folder + '/pids', 'w').write(f'{os.getpid()} {child.pid}')\n"
        "open(folder + '/ready', 'w').close()\n"
    )
    trial = _run(tmp_path, source + FOREVER)
    assert (trial.status, trial.reason) == (FAILED, "error: gone")
    for pid in map(int, (tmp_path / "trial" / "pids").read_text().split()):
        _wait_until_gone(pid)


def _wait_until_gone(pid: int) -> None:
    """Wait for a process to end, or to be a zombie that init has not reaped yet."""
    end = time.monotonic() + 60
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        state = Path(f"/proc/{pid}/stat")
        if state.exists() and state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        assert time.monotonic() < end, pid
        time.sleep(0.05)


def test_what_takes_too_long_is_ended(tmp_path: Path) -> None:
    trial = _run(tmp_path, FOREVER, replace(LENGTH, timeout=0.3))
    assert (trial.status, trial.reason) == (TIMED_OUT, "not done after 0.3 s")


def test_a_trial_reads_and_writes_no_checkpoint(tmp_path: Path) -> None:
    config = Config()
    config = replace(
        config,
        checkpoint=replace(config.checkpoint, save="runs/mine", load="runs/mine"),
        training=replace(
            config.training, train_samples=1000, rampup_batch_size=(4, 4, 24), global_batch_size=8
        ),
    )
    cut = trial_config(config, tmp_path / "m.jsonl", LENGTH)
    assert (cut.checkpoint.save, cut.checkpoint.load, cut.training.rampup_batch_size) == (None, None, None)
    assert (cut.training.train_samples, cut.training.train_iters, cut.training.exit_interval) == (
        1000,
        None,
        4,
    )
    assert trial_config(Config(), tmp_path / "m.jsonl", LENGTH).training.train_iters == 4


ABOUT = {"flags": ("--lr", "1e-3"), "world size": 2}
GOOD, BAD = Trial(DONE, "", 0.5, 100.0, 2e9), Trial(FAILED, "error: no")


def test_each_trial_is_there_for_the_next_start(tmp_path: Path) -> None:
    results = Results(tmp_path, ABOUT)
    results.add("--tp 1", GOOD)
    assert Results(tmp_path, ABOUT).get("--tp 1") == GOOD
    results.add("--tp 2", BAD)
    again = Results(tmp_path, ABOUT)
    assert (len(again), again.get("--tp 2"), again.get("--tp 4")) == (2, BAD, None)
    assert [file.name for file in tmp_path.iterdir()] == [FILE]


def test_another_tunings_results_are_not_mixed_in(tmp_path: Path) -> None:
    Results(tmp_path, ABOUT).add("--tp 1", GOOD)
    with pytest.raises(
        UserError, match=r"results of another tuning \(world size changed\): pass another --folder"
    ):
        Results(tmp_path, {**ABOUT, "world size": 4})


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"about": [1], "trials": []}', '{"about": {}, "trials": [{"layout": "x", "odd": 1}]}'],
)
def test_a_file_that_is_no_results_file(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(UserError, match="is not a results file"):
        Results(tmp_path, ABOUT)


def test_a_results_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be used"):
        Results(tmp_path / "file" / "folder", ABOUT)
