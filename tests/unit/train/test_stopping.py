"""Test the signals and conditions that stop a run, and the note for a scheduler."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megalite.checkpoint.lease import LeaseLost
from megalite.config import TrainingConfig
from megalite.distributed.topology import Topology
from megalite.train.stopping import (
    CHECK_SECONDS,
    REQUEUE_FILE,
    RequeueNote,
    Stop,
    StopConditions,
    Stopped,
    StopSignals,
    exit_if_switched_off,
    stop_signals,
)

ROOT = Path(__file__).parents[3]
PROCESS = """
import sys, threading
from megalite.train.stopping import RequeueNote
from megalite.train.stopping import stop_signals

with stop_signals(["SIGTERM"], RequeueNote(sys.argv[1])):
    print("ready", flush=True)
    threading.Event().wait()  # as in a collective
"""
ENDING = """
import atexit, os, signal
from megalite.train.stopping import RequeueNote
from megalite.train.stopping import stop_signals

with stop_signals(["SIGTERM"], RequeueNote(None)) as signals:
    signals.hold()
    atexit.register(os.kill, os.getpid(), signal.SIGTERM)
    raise SystemExit(75)
"""


@pytest.fixture
def wait_until():
    """Poll for a condition that another thread makes true."""

    def wait(condition) -> None:
        deadline = time.monotonic() + 300.0
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    return wait


def test_a_held_signal_is_noted_and_the_process_goes_on(wait_until) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with stop_signals(["SIGTERM", "SIGUSR1"], RequeueNote(None)) as signals:
        signals.hold()
        assert signals.received is None
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_until(lambda: signals.received == "SIGUSR1")
    assert signal.getsignal(signal.SIGUSR1) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_nothing_is_listened_to_without_names() -> None:
    before = signal.getsignal(signal.SIGINT)
    with stop_signals([], RequeueNote(None)):
        assert signal.getsignal(signal.SIGINT) is before


def test_a_ctrl_c_of_terminal_and_launcher_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[int] = []
    now = [5.0]
    monkeypatch.setattr(os, "_exit", ends.append)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    signals = StopSignals(RequeueNote(None))
    signals.hold()
    signals.notice("SIGINT")
    now[0] += 0.5
    signals.notice("SIGINT")
    assert (signals.received, ends) == ("SIGINT", [])
    now[0] += 1.0
    signals.notice("SIGINT")
    assert ends == [130]


def _process(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_before_the_first_iteration_a_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    process = _process(tmp_path)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=300)
    what = "received SIGTERM before the first iteration: there is nothing to save yet"
    assert (process.returncode, errors) == (75, f"error: {what}\n")
    assert (tmp_path / "requeue").read_text() == f"{what}\n"


def test_a_signal_while_the_interpreter_shuts_down_does_not_change_the_status() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", ENDING], env=environment, timeout=300).returncode == 75


def test_a_note_that_cannot_be_written_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    RequeueNote(str(tmp_path / "file")).write("x")
    assert "cannot be written" in caplog.text
    RequeueNote(None).write("x")
    RequeueNote(None).remove()


def test_the_note_exists_until_it_is_removed(tmp_path: Path) -> None:
    note = RequeueNote(str(tmp_path / "made"))
    note.write("SIGUSR1")
    assert (tmp_path / "made" / REQUEUE_FILE).read_text() == "SIGUSR1\n"
    note.remove()
    note.remove()
    assert not list((tmp_path / "made").iterdir())


def test_without_a_folder_there_is_no_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    RequeueNote(None).write("SIGUSR1")
    RequeueNote(None).remove()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("make", [lambda file: file.symlink_to("target"), os.mkfifo])
def test_a_link_is_not_followed_and_a_pipe_not_waited_for(tmp_path: Path, make, caplog) -> None:
    (tmp_path / "target").write_text("mine")
    make(tmp_path / REQUEUE_FILE)
    RequeueNote(str(tmp_path)).write("SIGUSR1")
    assert f"{REQUEUE_FILE} cannot be written" in caplog.text
    assert (tmp_path / "target").read_text() == "mine"


def test_a_folder_in_place_of_the_note_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / REQUEUE_FILE).mkdir()
    note = RequeueNote(str(tmp_path))
    note.write("SIGUSR1")
    note.remove()
    written, deleted = (record.getMessage() for record in caplog.records)
    assert f"{REQUEUE_FILE} cannot be written" in written
    assert f"{REQUEUE_FILE} cannot be deleted" in deleted


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the clock by seconds that the test sets."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def _conditions(topology: Topology, **settings: object) -> StopConditions:
    return StopConditions(TrainingConfig(**settings), topology, StopSignals(RequeueNote(None)))


def test_never_without_a_condition(topology, clock) -> None:
    stop = _conditions(topology, exit_signals=())
    clock[0] += 1e9
    assert stop.after(1000) is None


def test_at_each_multiple_of_the_interval(topology) -> None:
    stop = _conditions(topology, exit_interval=5)
    assert [iteration for iteration in range(1, 16) if stop.after(iteration)] == [5, 10, 15]
    reason = "iteration 5 is a multiple of --exit-interval 5"
    assert stop.after(5) == Stop(reason, status=0, wants_requeue=True)


def test_after_the_duration_counted_from_the_start(topology, clock) -> None:
    stop = _conditions(topology, exit_duration_in_mins=1.5)
    clock[0] += 2.0
    assert stop.after(1) is None
    clock[0] += 87.0
    assert stop.after(2) is None
    clock[0] += 2.0
    reason = "the run is older than --exit-duration-in-mins 1.5"
    assert stop.after(3) == Stop(reason, status=0, wants_requeue=True)


def test_ranks_check_less_often_if_iterations_are_short(topology, clock, monkeypatch) -> None:
    stop = _conditions(topology)
    checked: list[int] = []
    agreed = stop._agreed
    monkeypatch.setattr(stop, "_agreed", lambda: checked.append(iteration) or agreed())
    for iteration in range(1, 41):
        clock[0] += CHECK_SECONDS / 10 * 1.001 if iteration <= 30 else 1.0
        stop.after(iteration)
    assert checked[:5] == [1, 10, 19, 28, 37]  # the last of these pauses began with short iterations
    assert checked[5:] == [38, 39, 40]


@pytest.mark.parametrize(
    ("name", "status", "wants_requeue"),
    [("SIGTERM", 75, True), ("SIGUSR1", 75, True), ("SIGINT", 130, False)],
)
def test_a_stop_after_a_signal(topology, name: str, status: int, wants_requeue: bool) -> None:
    stop = _conditions(topology)
    stop.signals.hold()
    stop.signals.notice(name)
    assert stop.now() == Stop(f"received {name}", status, wants_requeue, is_urgent=True)
    with pytest.raises(Stopped, match=name):
        stop.raise_if_urgent()


def test_once_the_kill_switch_is_there_before_any_signal(topology, tmp_path: Path) -> None:
    switch = tmp_path / "stop"
    stop = _conditions(topology, kill_switch_path=str(switch))
    stop.signals.hold()
    exit_if_switched_off(stop.config, topology)
    assert stop.now() is None
    switch.touch()
    stop.signals.notice("SIGTERM")
    assert stop.now() == Stop(f"--kill-switch-path {switch} exists", is_urgent=True)
    with pytest.raises(SystemExit) as end:
        exit_if_switched_off(stop.config, topology)
    assert end.value.code == 0


def test_a_layout_file_stops_nothing(topology, tmp_path: Path) -> None:
    file = tmp_path / "layout"
    stop = StopConditions(TrainingConfig(), topology, StopSignals(RequeueNote(None)), layout_file=str(file))
    for exists in (False, True, False):
        if exists:
            file.touch()
        else:
            file.unlink(missing_ok=True)
        assert stop.now() is None
        assert stop.has_layout_file == exists


def test_an_age_alone_interrupts_nothing(topology, clock) -> None:
    stop = _conditions(topology, exit_duration_in_mins=1.0)
    clock[0] += 61.0
    stop.raise_if_urgent()
    assert stop.now() is not None


def test_a_run_that_has_lost_its_folder_ends(topology, lost_lease) -> None:
    """Test it without any other stop condition."""
    config = TrainingConfig(exit_signals=())
    stop = StopConditions(config, topology, StopSignals(RequeueNote(None)), lost_lease)
    with pytest.raises(LeaseLost, match=r"taken over by another run \(process"):
        stop.after(1)
