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
from contextlib import suppress
from pathlib import Path

from megalite.config import entry_point
from megalite.distributed.local_ranks import forked_with_torch

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


def _run(
    lines: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], timeout: float
) -> list[subprocess.CompletedProcess[str]]:
    context = forked_with_torch(__name__)
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="megalite-program-") as folder:
        outputs = [[f"{folder}/{name}_{rank}" for name in ("stdout", "stderr")] for rank in range(len(lines))]
        starts = zip(lines, environments, outputs, strict=True)
        processes = [context.Process(target=_main, args=each) for each in starts]
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        if late := [process for process in processes if process.is_alive()]:
            for process in late:
                process.kill()
                process.join()
            raise subprocess.TimeoutExpired(lines[0], timeout)
        texts = [[Path(output).read_text() for output in pair] for pair in outputs]
    return [
        subprocess.CompletedProcess(line, process.exitcode or 0, *pair)
        for line, process, pair in zip(lines, processes, texts, strict=True)
    ]


def _main(line: Sequence[str], environment: Mapping[str, str], outputs: Sequence[str]) -> None:
    for stream, output in zip((sys.stdout, sys.stderr), outputs, strict=True):
        stream.flush()
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), stream.fileno())
    os.fsync = os.fstat  # as in tests/conftest.py
    gc.freeze()  # what the server has imported: a run's collections would visit it
    os.chdir(ROOT)
    os.environ.update(environment, CUDA_VISIBLE_DEVICES="")
    entry_point._SECONDS_FOR_THE_FIRST_RANK = 0.0  # no torchrun would end the first rank before it prints
    sys.argv = list(line)
    sys.path.insert(0, str((ROOT / line[0]).parent))
    runpy.run_path(line[0], run_name="__main__")
