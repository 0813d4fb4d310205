"""Run programs of the repository, and read what they print."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks.gpu_check.runner import ROOT


class Finished(NamedTuple):
    """The result of a program.

    Attributes:
        text: text of its standard output and standard error.
    """

    status: int
    text: str

    @property
    def reason(self) -> str:
        """Return its error in a line: the first that begins with "error", else the last."""
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        return next((line for line in lines if line.startswith("error")), (lines or ["no output"])[-1])


def run(command: Sequence[str], env: Mapping[str, str] | None = None) -> Finished:
    """Run a program in the repository's root; its output goes to the log too."""
    print("$", " ".join(command), flush=True)
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        print(line, end="", flush=True)
    return Finished(process.wait(), "".join(lines))


def run_python(*arguments: str, env: Mapping[str, str] | None = None) -> Finished:
    """Run a Python program of the repository."""
    return run([sys.executable, *arguments], env)


def first_line(*command: str) -> str:
    """Return the first line that a program prints; a reason in brackets if it cannot run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"(none: {type(error).__name__})"
    return next(iter((done.stdout or done.stderr).strip().splitlines()), "(no output)")
