"""The end of a program: its status and its output, even if its reader has closed the pipe."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MORE_THAN_A_BUFFER = ["--stages", "16", "--microbatches", "256"]
RUN = "from megalite.utils.commands import run_main; run_main(main, [])"


def run_unread(*arguments: str, unbuffered: bool = False) -> subprocess.CompletedProcess[str]:
    """Run Python with a standard output that has no reader any more."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment |= {"PYTHONPATH": str(ROOT), **({"PYTHONUNBUFFERED": "1"} if unbuffered else {})}
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environment,
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=600,
        )
    finally:
        os.close(writer)


@pytest.mark.parametrize(
    ("flags", "unbuffered", "status"),
    [
        (MORE_THAN_A_BUFFER, False, 141),
        ([], True, 141),
        ([], False, 0),  # all of it is printed when the pipe is found closed
        (["--help"], False, 0),
        (["--chunks", "3"], False, 1),
    ],
)
def test_a_tool_ends_silently(flags: Sequence[str], unbuffered: bool, status: int) -> None:
    done = run_unread("tools/show_schedule.py", *flags, unbuffered=unbuffered)
    assert done.returncode == status, done.stderr
    assert "pipe" not in done.stderr.lower() and "Traceback" not in done.stderr
    assert done.stderr.startswith("error: --chunks 3") if status == 1 else done.stderr == ""


def test_output_that_is_lost_does_not_change_the_status_of_a_run() -> None:
    done = run_unread("-c", f"def main(_):\n    print('text')\n    raise SystemExit(75)\n{RUN}")
    assert (done.returncode, done.stderr) == (75, "")


def test_another_broken_pipe_keeps_its_traceback() -> None:
    fails = (
        "import os\ndef main(_):\n    ends = os.pipe()\n    os.close(ends[0])\n    os.write(ends[1], b'x')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{fails}{RUN}"], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 1
    assert "BrokenPipeError" in done.stderr


def test_the_list_of_commands_ends_silently() -> None:
    for unbuffered in (False, True):
        done = run_unread("-m", "megalite", unbuffered=unbuffered)
        assert (done.returncode, done.stderr) == (0, "")


RANK = """
import atexit
from megalite.utils.commands import run_rank
from megalite.utils.errors import UserError

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


def run_program(end: str, **options: object) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [sys.executable, "-c", RANK.format(end=end)],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT)},
        text=True,
        timeout=600,
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
    done = run_program(end)
    assert (done.returncode, done.stdout) == (status, "done\nat exit\n")


def test_the_text_of_an_exit_is_printed() -> None:
    done = run_program("raise SystemExit('error: no')")
    assert (done.returncode, done.stderr) == (1, "error: no\n")


def test_an_exception_keeps_its_traceback() -> None:
    done = run_program("raise ValueError('mistake')")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ValueError: mistake"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_an_error() -> None:
    with open("/dev/full", "w") as full:
        done = run_program("return", stdout=full)
    assert done.returncode == 1
    assert done.stderr == "error: the output cannot be written (No space left on device)\n"
