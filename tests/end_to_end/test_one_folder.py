"""Whole runs that want one folder of checkpoints."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.soak.folder import is_whole, iterations_of
from tests.soak.group import Group
from tests.soak.kill_loop import RUN

JOB = {"SLURM_JOB_ID": "812", "CUDA_VISIBLE_DEVICES": ""}
REQUEUED = {**JOB, "SLURM_RESTART_COUNT": "1"}
DECAY = ("--lr-decay-iters", "1000")
PATIENCE = 300.0


def _flags(folder: Path, train_iters: int, ranks: int) -> list[str]:
    files = ["--save", str(folder), "--load", str(folder), "--metrics-file", str(folder / "metrics.jsonl")]
    own = [
        "--layout",
        "manual",
        "--tp",
        str(ranks),
        "--train-iters",
        str(train_iters),
        "--save-interval",
        "2",
    ]
    return [*RUN, *own, *DECAY, *files]


@contextmanager
def _started(folder: Path, train_iters: int, environment: dict[str, str], ranks: int = 2) -> Iterator[Group]:
    """A run, none of whose ranks outlives the block."""
    group = Group.start(ranks, _flags(folder, train_iters, ranks), folder, environment)
    try:
        yield group
    finally:
        group.kill(range(group.size))


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _contents(folder: Path) -> dict[Path, tuple[int, str]]:
    """Return the time of change and the digest of each file."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {file: (file.stat().st_mtime_ns, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files}


def test_a_second_run_a_requeued_one_and_one_that_was_only_stopped(tmp_path: Path) -> None:
    """A stale run is stopped as it stands, its successor takes over and ends, and the stale one goes on."""
    folder = tmp_path / "run"
    with ExitStack() as stack:
        stale = stack.enter_context(_started(folder, 10**6, JOB))
        _wait_for(lambda: len(iterations_of(folder)) > 4)

        second = stack.enter_context(_started(folder, 4, JOB, ranks=1))
        assert second.wait() == 1
        refused = f"error: --save {folder} is in use by another run (process "
        assert refused in second.log.read_text()
        assert not stale.is_over()

        stale.freeze()
        iteration = max(iterations_of(folder))
        successor = stack.enter_context(_started(folder, iteration + 4, REQUEUED))
        assert successor.wait() == 0
        taken = f"warning: --save {folder} is taken over: its holder is an earlier start of this Slurm job ("
        assert taken in successor.log.read_text()

        before, metrics = _contents(folder), folder / "metrics.jsonl"
        lines = metrics.read_text().splitlines()
        assert not any(file.relative_to(folder).parts[0].startswith((".", "lease")) for file in before)
        stale.go_on()
        assert stale.wait() == 1
        assert (
            f"error: --save {folder} was taken over by another run: this run stops" in stale.log.read_text()
        )
        # It may have been stopped between its check and its append of a record, which nothing can take back.
        late = metrics.read_text().splitlines()
        assert late[: len(lines)] == lines
        assert len(late) <= len(lines) + 1
        assert {**_contents(folder), metrics: None} == {**before, metrics: None}
    checkpoints = list(folder.glob("iter_*"))
    assert len(checkpoints) > 2
    assert all(map(is_whole, checkpoints))


def test_the_successor_of_a_killed_run_does_not_wait(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with _started(folder, 10**6, JOB) as killed:
        _wait_for(lambda: len(iterations_of(folder)) > 4)
    assert [path.name for path in folder.glob("lease.*")] == ["lease.1"]
    with _started(folder, max(iterations_of(folder)) + 2, JOB) as successor:
        assert successor.wait() == 0
    assert f"--save {folder} is taken over: its holder has ended (process " in successor.log.read_text()
    assert "waiting to see whether that run is alive" not in successor.log.read_text()
    assert killed.told().resumed_at == 0
    assert successor.told().resumed_at
    assert not list(folder.glob("lease.*"))
