"""The end of a rank's process: its status and output are kept, and Python does not finalize."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = """
import atexit
from megalite.config.entry_point import run_rank
from megalite.errors import UserError

class Last:
    def __del__(self):
        print("finalized", flush=True)

last = Last()
atexit.register(print, "at exit")

def main(arguments):
    print("done")
    {end}

run_rank(main, [])
"""


def run(end: str, **options: object) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(end=end)],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT)},
        text=True,
        timeout=120,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("return", 0),
        ("raise SystemExit(75)", 75),
        ("raise SystemExit", 0),
        ("raise UserError('no')", 1),
        ("raise KeyboardInterrupt", 130),
    ],
)
def test_the_process_ends_with_its_status_and_output(end: str, status: int) -> None:
    done = run(end)
    assert (done.returncode, done.stdout) == (status, "done\nat exit\n")


def test_an_exception_keeps_its_traceback() -> None:
    done = run("raise ValueError('mistake')")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: mistake"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_an_error() -> None:
    with open("/dev/full", "w") as full:
        done = run("return", stdout=full)
    assert done.returncode == 1
    assert done.stderr == "error: the output cannot be written (No space left on device)\n"
