"""Programs of the repository, run in forked processes that have torch already: its import takes seconds."""

from __future__ import annotations

import gc
import os
import random
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from megalite.distributed.local_ranks import forked_with_torch
from megalite.utils import commands

ROOT = Path(__file__).parents[1]


def run_program(
    path: str | Path, *arguments: object, environment: Mapping[str, str] | None = None, timeout: float = 600.0
) -> subprocess.CompletedProcess[str]:
    """Run what ``python PATH ARGUMENTS`` runs in the repository's folder, on a CPU."""
    return _run([[str(path), *map(str, arguments)]], [environment or {}], timeout)[0]


def run_program_on_ranks(
    path: str, *arguments_of_ranks: Sequence[object], timeout: float = 600.0
) -> list[subprocess.CompletedProcess[str]]:
    """Run the program once per rank, with the variables that a scheduler sets.

    Args:
        arguments_of_ranks: the arguments of each rank; their number is the world size.
    """
    shared = {
        "WORLD_SIZE": str(len(arguments_of_ranks)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    lines = [[path, *map(str, arguments)] for arguments in arguments_of_ranks]
    environments = [{"RANK": str(rank), "LOCAL_RANK": str(rank), **shared} for rank in range(len(lines))]
    return _run(lines, environments, timeout)


def free_port() -> int:
    """Return a port that is free, and that the system does not give to another socket by itself."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)  # Linux' own are from 32768 on
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port


class StartedProgram:
    """A program that runs beside its test, and ends with its ``with`` block at the latest.

    Args:
        line: path of the program in the repository, and its arguments.
        outputs: two files, for its output and its errors; one that is named twice has both.
    """

    def __init__(self, line: Sequence[str], environment: Mapping[str, str], outputs: Sequence[Path]) -> None:
        self.line, self._outputs = list(line), outputs
        self.process = forked_with_torch(__name__).Process(target=_main, args=(line, environment, outputs))

    def __enter__(self) -> StartedProgram:
        self.process.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.join()

    def ended(self, timeout: float = 600.0) -> subprocess.CompletedProcess[str]:
        """Wait for its end, and return its status and what it has written."""
        self.process.join(max(0.0, timeout))
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(self.line, timeout)
        texts = (output.read_text() for output in self._outputs)
        return subprocess.CompletedProcess(self.line, self.process.exitcode, *texts)


def _run(
    lines: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], timeout: float
) -> list[subprocess.CompletedProcess[str]]:
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="megalite-program-") as folder, ExitStack() as stack:
        programs = [
            stack.enter_context(
                StartedProgram(line, variables, [Path(folder, f"{name}_{rank}") for name in ("out", "err")])
            )
            for rank, (line, variables) in enumerate(zip(lines, environments, strict=True))
        ]
        return [program.ended(deadline - time.monotonic()) for program in programs]


def _main(line: Sequence[str], environment: Mapping[str, str], outputs: Sequence[Path]) -> None:
    for stream, output in zip((sys.stdout, sys.stderr), outputs, strict=True):
        stream.flush()
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream.fileno())
    os.fsync = os.fstat  # as in tests/conftest.py
    gc.freeze()  # what the server has imported: a run's collections would visit it
    os.chdir(ROOT)
    os.environ.update(environment, CUDA_VISIBLE_DEVICES="")
    tempfile.tempdir = None  # what the server has found in its own TMPDIR
    commands._SECONDS_FOR_THE_FIRST_RANK = 0.0  # no torchrun would end the first rank before it prints
    sys.argv = list(line)
    sys.path.insert(0, str((ROOT / line[0]).parent))
    runpy.run_path(line[0], run_name="__main__")
