"""Test the signals that stop a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megalite.train.stopping import RequeueNote, StopSignals, stop_signals

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
        deadline = time.monotonic() + 10.0
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
    _, errors = process.communicate(timeout=30)
    what = "received SIGTERM before the first iteration: there is nothing to save yet"
    assert (process.returncode, errors) == (75, f"error: {what}\n")
    assert (tmp_path / "requeue").read_text() == f"{what}\n"


def test_a_signal_while_the_interpreter_shuts_down_does_not_change_the_status() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", ENDING], env=environment, timeout=60).returncode == 75


def test_a_note_that_cannot_be_written_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    RequeueNote(str(tmp_path / "file")).write("x")
    assert "cannot be written" in caplog.text
    RequeueNote(None).write("x")
    RequeueNote(None).remove()
