"""The ledger of what the tests cost: what it measures, and which folders fall short."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cost import dearer, folder_of, processor_seconds, read_ledger

ROOT = Path(__file__).parents[2]
BUSY = "import time; end = time.process_time() + 0.5\nwhile time.process_time() < end: pass"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system has no /proc")
def test_programs_that_ran_and_that_run_are_counted() -> None:
    before = processor_seconds(os.getpid())
    subprocess.run([sys.executable, "-c", BUSY], check=True)
    program = [sys.executable, "-c", f"{BUSY}\nprint(flush=True); input()"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        running.stdout.readline()
        assert processor_seconds(os.getpid()) >= before + 0.98
        running.communicate(b"\n")


def test_a_folder_is_compared_with_the_others_of_the_run() -> None:
    recorded = {"unit/data": 100.0, "ranks/train": 200.0, "parity": 50.0, "fake_cuda": 2.0}
    slower = {folder: 1.7 * seconds for folder, seconds in recorded.items()} | {"unit/new": 500.0}
    assert dearer(slower, recorded) == []
    assert dearer({**slower, "parity": 1.7 * 84.9, "fake_cuda": 1.7 * 12.0}, recorded) == []
    (line,) = dearer({**slower, "parity": 1.7 * 85.2}, recorded)
    assert line.startswith("tests/parity costs 85 s, by tests/cost.json 50: ")


def test_the_ledger_names_folders_of_tests() -> None:
    tests = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    assert set(read_ledger()) <= {folder_of(test) for test in tests}
