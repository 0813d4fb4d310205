"""A folder of checkpoints has one writer: who gets it, who is refused, and who finds that it is lost."""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from megalite.checkpoint import lease as lease_module
from megalite.checkpoint.lease import HeldLease, LeaseHolder, LeaseLost
from megalite.utils.errors import UserError


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A heartbeat of hundredths of a second, outside of Slurm; by itself silence never ends a lease."""
    never = float("inf")
    for name, seconds in (("BEAT_SECONDS", 0.02), ("ABANDONED_SECONDS", never), ("_CHECK_SECONDS", 0.0)):
        monkeypatch.setattr(lease_module, name, seconds)
    monkeypatch.setattr(lease_module, "_POLL_SECONDS", 0.01)
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[HeldLease]:
    lease = HeldLease.take(tmp_path)
    yield lease
    lease.release()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(lease_module.log, "propagate", True)
    caplog.set_level(logging.INFO, logger=lease_module.log.name)
    return caplog


def leave_lease(folder: Path, **fields: object) -> LeaseHolder:
    """Leave the lease of a process that writes no heartbeat."""
    holder = dataclasses.replace(LeaseHolder.here(), **fields)  # type: ignore[arg-type]
    (folder / "lease.1").write_bytes(holder.content())
    return holder


@contextmanager
def beating(file: Path) -> Iterator[None]:
    """Touch a lease again and again, as a holder elsewhere does."""
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(0.02):
            os.utime(file)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def test_a_lease_that_is_released_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "run"
    for _ in range(2):
        lease = HeldLease.take(folder)
        assert names(folder) == {"lease.1"}
        lease.check()
        assert not lease.is_lost()
        lease.release()
        assert names(folder) == set()


def test_a_living_run_is_named_and_keeps_the_folder(held: HeldLease, tmp_path: Path) -> None:
    who = rf"process {os.getpid()} on {socket.gethostname()}, since"
    message = rf"--save {tmp_path} is in use by another run \({who}"
    with pytest.raises(UserError, match=message):
        HeldLease.take(tmp_path)
    held.check()
    assert names(tmp_path) == {"lease.1"}


def test_a_process_that_has_ended_is_succeeded_at_once(tmp_path: Path, lines) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    leave_lease(tmp_path, pid=ended.pid, pid_start=lease_module._start_of(ended.pid))
    (tmp_path / ".iter_0000002.0123456789abcdef.partial").mkdir()
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # from here on it is a zombie
    lease = HeldLease.take(tmp_path)
    ended.wait()
    assert names(tmp_path) == {"lease.2"}
    (message,) = lines.messages
    assert message.startswith(
        f"--save {tmp_path} is taken over: its holder has ended (process {ended.pid} on "
    )
    lease.release()
    leave_lease(tmp_path, pid=ended.pid)
    HeldLease.take(tmp_path).release()
    leave_lease(tmp_path, pid_start=1)  # our number, which another process had before
    HeldLease.take(tmp_path).release()


@pytest.mark.parametrize("content", [None, b"", b"[1]", b'{"pid": 1}'])
def test_silence_is_waited_for_where_no_machine_can_know(tmp_path: Path, content, lines, monkeypatch) -> None:
    """Another host's process, and one that died before it had written its name."""
    monkeypatch.setattr(lease_module, "ABANDONED_SECONDS", 0.1)
    leave_lease(tmp_path, host="n7", machine="another")
    if content is not None:
        (tmp_path / "lease.1").write_bytes(content)
    lease = HeldLease.take(tmp_path)
    assert names(tmp_path) == {"lease.2"}
    waiting, message = lines.messages
    assert waiting.endswith(": waiting to see whether that run is alive")
    assert "is taken over: its holder has shown no heartbeat for 0.1 s (" in message
    lease.release()


@pytest.mark.parametrize("number", ["999999999", "9" * 18, "9" * 99])
def test_a_file_of_any_number_does_not_lock_the_folder(tmp_path: Path, number: str, monkeypatch) -> None:
    monkeypatch.setattr(lease_module, "ABANDONED_SECONDS", 0.1)
    (tmp_path / f"lease.{number}").touch()
    lease = HeldLease.take(tmp_path)
    assert names(tmp_path) == {f"lease.{int(number) + 1}"}
    lease.check()
    lease.release()
    assert names(tmp_path) == set()


def test_a_file_of_the_largest_number_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(lease_module, "ABANDONED_SECONDS", 0.1)
    foreign = {
        f"lease.{'9' * 101}",
        "lease.",
        "lease.-1",
        "lease.01",
        "lease.1e9",
        "lease.\u0661",
        "lease.1.txt",
    }
    for name in foreign:
        (tmp_path / name).touch()
    lease = HeldLease.take(tmp_path)
    assert names(tmp_path) == foreign | {"lease.1"}
    lease.release()
    (tmp_path / f"lease.{'9' * 100}").touch()
    with pytest.raises(
        UserError, match=r"holds lease\.9+, and no lease has a larger number: delete that file"
    ):
        HeldLease.take(tmp_path)


def test_a_holders_names_are_one_line(tmp_path: Path) -> None:
    leave_lease(tmp_path, host="n7\nerror: \x1b[2J", machine="another", since="\u2028")
    with beating(tmp_path / "lease.1"), pytest.raises(UserError, match=r"n7\\nerror: \\x1b") as error:
        HeldLease.take(tmp_path)
    assert len(str(error.value).splitlines()) == 1


def test_another_host_shows_that_it_lives_by_its_heartbeat(tmp_path: Path) -> None:
    leave_lease(tmp_path, host="n7", machine="another", job="812", job_starts=3)
    with (
        beating(tmp_path / "lease.1"),
        pytest.raises(UserError, match=r"on n7, Slurm job 812 start 3, since .*end that run"),
    ):
        HeldLease.take(tmp_path)


def test_a_requeued_job_succeeds_its_own_earlier_start(tmp_path: Path, lines, monkeypatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "812")
    stale = HeldLease.take(tmp_path)
    with pytest.raises(UserError, match="in use by another run"):  # the same start: two runs of one script
        HeldLease.take(tmp_path)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    stale.check()
    lease = HeldLease.take(tmp_path)
    assert "its holder is an earlier start of this Slurm job (" in lines.messages[-1]
    assert stale.is_lost()
    with pytest.raises(LeaseLost, match=r"taken over by another run \(process .*job 812 start 1, since"):
        stale.check()
    stale.release()
    assert names(tmp_path) == {"lease.2"}
    lease.check()
    lease.release()


def test_of_many_that_want_a_folder_one_gets_it(tmp_path: Path) -> None:
    leave_lease(tmp_path, pid_start=1)
    start = threading.Barrier(8)

    def take(_: int) -> HeldLease | None:
        start.wait()
        try:
            return HeldLease.take(tmp_path)
        except UserError:
            return None

    with ThreadPoolExecutor(8) as pool:
        (lease,) = filter(None, pool.map(take, range(8)))
    lease.check()
    assert names(tmp_path) == {f"lease.{lease.number}"}
    lease.release()


def test_a_folder_that_is_away_for_a_while_is_not_lost(held: HeldLease, tmp_path: Path) -> None:
    away = tmp_path.with_name("away")
    tmp_path.rename(away)
    with pytest.raises(FileNotFoundError):
        held.check()
    tmp_path.mkdir()  # what is left of a lost mount
    with pytest.raises(FileNotFoundError):
        held.check()
    assert not held.is_lost()
    tmp_path.rmdir()
    away.rename(tmp_path)
    held.check()


def test_a_lease_that_was_deleted_is_lost(held: HeldLease, tmp_path: Path) -> None:
    (tmp_path / f"lease.{held.number}").unlink()
    with pytest.raises(LeaseLost):
        held.check()
    assert held.is_lost()


def test_a_check_that_was_interrupted_is_repeated(
    held: HeldLease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may be stopped after it has read its lease; the answer is old when it goes on."""
    read, now = held.files.read, [1000.0]

    def stopped_after_reading(number: int) -> tuple[bytes, object]:
        content = read(number)
        now[0] += 600
        return content

    monkeypatch.setattr(lease_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(lease_module, "_CHECK_SECONDS", 1.0)
    with monkeypatch.context() as during:
        during.setattr(held.files, "read", stopped_after_reading)
        held.check()
    (tmp_path / f"lease.{held.number}").unlink()
    assert held.is_lost()


def test_a_link_in_the_leases_place_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    (tmp_path / "lease.1").symlink_to(target)
    with pytest.raises(UserError, match=r"symbolic link: .*lease\.1"):
        HeldLease.take(tmp_path)
    assert target.read_text() == "mine"
