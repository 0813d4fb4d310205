"""NVIDIA's Multi-Process Service (MPS) for ranks that share a GPU: without it they take turns on the GPU."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from megalite.utils.hardware.process_settings import MPS_FOLDER, running_mps

LOG = "CUDA_MPS_LOG_DIRECTORY"
PROGRAM = "nvidia-cuda-mps-control"
FOLDERS = ("/usr/local/nvidia/bin", "/usr/lib/nvidia/bin", "/usr/lib/nvidia-current")
"""Where the program may be, besides PATH."""
SECONDS_TO_START = 10.0
SECONDS_TO_END = 2.0
"""Seconds that a daemon has to end before it is killed."""


class Mps:
    """A daemon of MPS for the programs that this process starts in a ``with`` block.

    A daemon of the machine is used as it is. Otherwise one is started, with folders of its own, and only that
    one is ever ended. The GPU's compute mode stays as it is.

    Attributes:
        problem: why no daemon serves this process, in a line; empty if one does.
        is_own: whether the block has started the daemon.
    """

    def __init__(self) -> None:
        self.problem = ""
        self.is_own = False
        self._folder = Path(tempfile.gettempdir()) / f"megalite-mps-{os.getuid()}"  # sockets have short paths
        self._before = {name: os.environ.get(name) for name in (MPS_FOLDER, LOG)}

    def __enter__(self) -> Mps:
        if running_mps() is None:
            self.is_own = True
            self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_own:
            self._stop()

    def restart(self) -> None:
        """Start the daemon again, if it is this process's: it may hang after a program was killed."""
        if self.is_own and not self.problem:
            self._stop()
            self._start()

    def _start(self) -> None:
        program = shutil.which(PROGRAM, path=os.pathsep.join([os.environ.get("PATH", ""), *FOLDERS]))
        if program is None:
            self.problem = f"{PROGRAM} is not installed"
            return
        self._end_daemon()  # a check that was killed has left it
        for name, folder in ((MPS_FOLDER, "pipe"), (LOG, "log")):
            (self._folder / folder).mkdir(parents=True, exist_ok=True)
            os.environ[name] = str(self._folder / folder)
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        try:
            # The daemon goes to the background, with the outputs of the command.
            started = subprocess.run(
                [program, "-d"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=SECONDS_TO_START,
            )
            problem = f"status {started.returncode}" if started.returncode else ""
        except subprocess.TimeoutExpired:
            problem = f"no answer in {SECONDS_TO_START:.0f} s"
        if problem:
            self._stop()
            self.problem = f"{PROGRAM} -d cannot start: {problem}; its log is in {self._folder / 'log'}"

    def _stop(self) -> None:
        self._end_daemon()
        for name, value in self._before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    def _end_daemon(self) -> None:
        """End the daemon with this folder and its servers; it may not answer to a request."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            processes = list(self._processes())
            for process in processes:
                with suppress(ProcessLookupError):
                    os.kill(process, number)
            end = time.monotonic() + SECONDS_TO_END
            while processes and time.monotonic() < end and any(self._processes()):
                time.sleep(0.05)

    def _processes(self) -> Iterator[int]:
        mark = f"{MPS_FOLDER}={self._folder / 'pipe'}".encode()
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or is another user's
                is_daemon = entry.joinpath("comm").read_text().startswith("nvidia-cuda-mps")
                if is_daemon and mark in entry.joinpath("environ").read_bytes().split(b"\0"):
                    yield int(entry.name)
