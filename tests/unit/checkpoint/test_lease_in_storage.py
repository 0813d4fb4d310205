"""A prefix in object storage has one writer: the rules of `test_lease`, by conditions of writes."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megalite.checkpoint import lease as lease_module
from megalite.checkpoint.lease import FolderLease, HeldLease, LeaseHolder, LeaseLost
from megalite.checkpoint.lease_files import ObjectsOfStore
from megalite.utils.errors import UserError
from tests.object_server import ObjectServer, s3_in

pytest.importorskip("obstore")

RUN = "s3://b/run"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("BEAT_SECONDS", 0.02), ("_POLL_SECONDS", 0.01), ("_CHECK_SECONDS", 0.0)):
        monkeypatch.setattr(lease_module, name, seconds)
    monkeypatch.setattr(lease_module, "ABANDONED_SECONDS", 60.0)
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    with s3_in(tmp_path, monkeypatch) as server:
        yield server


def leave_lease(server: ObjectServer, **fields: object) -> None:
    """Leave the lease of a process that writes no heartbeat."""
    holder = dataclasses.replace(LeaseHolder.here(), **fields)  # type: ignore[arg-type]
    server.objects["b/run/lease.1"] = holder.content()


def test_a_lease_lives_by_its_heartbeat_and_leaves_nothing(server: ObjectServer) -> None:
    lease = HeldLease.take(RUN)
    assert server.objects.keys() == {"b/run/lease.1"}
    before = server.written["b/run/lease.1"]
    while server.written["b/run/lease.1"] == before:  # a heartbeat
        time.sleep(0.01)
    lease.check()
    FolderLease(RUN, lease.number, lease.content).check()  # on another rank
    with pytest.raises(UserError, match=r"--save s3://b/run is in use by another run \(process \d+ on "):
        HeldLease.take(RUN)
    lease.release()
    assert not server.objects


def test_a_heartbeat_whose_answer_was_lost_is_not_the_last(server: ObjectServer) -> None:
    """Some stores give every write a version of its own."""
    lease = HeldLease.take(RUN)
    assert isinstance(lease.files, ObjectsOfStore) and lease.files._own is not None
    name, content, _ = lease.files._own
    lease.files._own = name, content, "of before"
    lease.files.touch()
    assert lease.files._own[2] != "of before"
    lease.release()


def test_silence_ends_a_lease_and_its_holder_finds_out(server: ObjectServer, monkeypatch) -> None:
    """A holder that stands still for longer, and goes on, must not write; its heartbeat does not return."""
    beat, goes_on = ObjectsOfStore.touch, threading.Event()
    monkeypatch.setattr(ObjectsOfStore, "touch", lambda _: goes_on.wait(30.0))
    stale = HeldLease.take(RUN)
    server.objects["b/run/lease.1"] = dataclasses.replace(LeaseHolder.here(), machine="another").content()
    stale.content = server.objects["b/run/lease.1"]
    monkeypatch.setattr(lease_module, "ABANDONED_SECONDS", 0.1)
    monkeypatch.setattr(ObjectsOfStore, "touch", beat)
    successor = HeldLease.take(RUN)
    assert server.objects.keys() == {"b/run/lease.2"}
    with pytest.raises(LeaseLost, match=r"s3://b/run was taken over by another run \(process "):
        stale.check()
    with pytest.raises(FileNotFoundError):
        stale.files.touch()
    goes_on.set()
    stale.release()
    successor.check()
    successor.release()
    assert not server.objects


def test_of_many_that_want_a_prefix_one_gets_it(server: ObjectServer) -> None:
    leave_lease(server, pid_start=1)
    start = threading.Barrier(6)

    def take(_: int) -> HeldLease | None:
        start.wait()
        try:
            return HeldLease.take(RUN)
        except UserError:
            return None

    with ThreadPoolExecutor(6) as pool:
        (lease,) = filter(None, pool.map(take, range(6)))
    lease.check()
    assert server.objects.keys() == {f"b/run/lease.{lease.number}"}
    lease.release()


def test_a_store_without_conditions_and_one_that_may_not_be_written_are_refused(server: ObjectServer) -> None:
    server.ignores_conditions = True
    with pytest.raises(UserError, match=r"--save s3://b/run is in a store that ignores conditions of writes"):
        HeldLease.take(RUN)
    server.ignores_conditions, server.is_read_only = False, True
    with pytest.raises(UserError, match=r"--save s3://b/run cannot be written \(.*: s3://b/run/lease\.\d"):
        HeldLease.take(RUN)


def test_a_loss_is_found_although_training_does_not_wait_for_an_answer(server: ObjectServer) -> None:
    lease = HeldLease.take(RUN)
    lease.check()
    server.objects["c/run/lease.1"] = server.objects.pop("b/run/lease.1")
    with server.lock:  # no answer comes
        while not lease._check_thread.is_alive():
            assert not lease.is_lost()
            time.sleep(0.01)
        assert not lease.is_lost()
    while not lease.is_lost():
        time.sleep(0.01)
    lease.release()
