"""Ranks of a tool on this machine: Ctrl-C ends the tool and its ranks with one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = """
import time
from megalite import ParallelConfig
from megalite.utils.commands import run_main
from megalite.distributed import local_ranks

def wait(topology):
    print("a rank runs", flush=True)
    time.sleep(1000)

def main(arguments):
    print("started", flush=True)
    local_ranks.run_ranks(wait, ParallelConfig().mesh, 2)

if __name__ == "__main__":
    run_main(main, [])
"""


def test_a_mistake_that_all_ranks_report_is_one_line(tmp_path: Path) -> None:
    program = PROGRAM.replace("time.sleep(1000)", 'raise UserError("a mistake")')
    (tmp_path / "program.py").write_text("from megalite.utils.errors import UserError\n" + program)
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (1, "error: a mistake\n")


@pytest.mark.parametrize(("last_line", "seconds"), [("started", 1.0), ("a rank runs", 0.0)])
def test_ctrl_c_prints_one_line_and_leaves_no_rank(last_line: str, seconds: float, tmp_path: Path) -> None:
    """Interrupt the group of processes, as a terminal does, while the fork server starts or ranks run."""
    (tmp_path / "program.py").write_text(PROGRAM)
    with subprocess.Popen(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as program:
        try:
            assert program.stdout is not None
            while program.stdout.readline().strip() not in (last_line, ""):
                pass
            time.sleep(seconds)
            os.killpg(program.pid, signal.SIGINT)
            _, printed = program.communicate(timeout=300)
            assert (program.returncode, printed) == (130, "error: interrupted\n")
            deadline = time.monotonic() + 300.0
            while _running(program.pid):  # the fork server ends after the program
                assert time.monotonic() < deadline, "a process is left"
                time.sleep(0.1)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)


def _running(group: int) -> list[str]:
    """Return the processes of a group, but those that have ended and wait for a parent."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, of_process = file.read_text().rpartition(")")[2].split()[:3]
            if int(of_process) == group and state != "Z":
                found.append(file.parent.name)
    return found
