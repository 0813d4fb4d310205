"""The ranks of one start of a run, each a process."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

from megalite.cli import train
from megalite.distributed.local_ranks import forked_with_torch
from megalite.utils.commands import run_main
from tests.programs import free_port

_SECONDS_TO_NOTICE = 20.0
"""How long ranks have to end by themselves after one of them is gone; after that they are killed."""
_RESUMED = re.compile(r"^resumed from .* at iteration (\d+)", re.MULTILINE)
_NEW = re.compile(r"starts? from new weights", re.MULTILINE)


class Start(NamedTuple):
    """What a start said of itself.

    Attributes:
        resumed_at: 0 for a start from new weights; None if it did not come so far.
    """

    resumed_at: int | None


class Group:
    """Processes of ranks, which can be stopped as they stand, killed and awaited."""

    def __init__(self, processes: list[BaseProcess], log: Path) -> None:
        self._processes = processes
        self.log = log

    @staticmethod
    def start(
        num_ranks: int,
        arguments: Sequence[str],
        folder: Path,
        further: Mapping[str, str] | None = None,
        of_ranks: Sequence[Sequence[str]] = (),
    ) -> Group:
        """Starts one process a rank; what they print goes to a file beside the folder.

        Args:
            further: variables of the environment.
            of_ranks: further arguments of each rank.
        """
        folder.mkdir(parents=True, exist_ok=True)
        context = forked_with_torch(__name__)
        number = len(list(folder.parent.glob(f"{folder.name}_*.log")))
        log = folder.parent / f"{folder.name}_{number:03d}.log"
        log.touch()
        port = str(free_port())
        processes: list[BaseProcess] = []
        for rank in range(num_ranks):
            environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **(further or {})}
            own = [*arguments, *(of_ranks[rank] if of_ranks else ())]
            process = context.Process(target=_rank_main, args=(environment, own, str(log)))
            process.start()
            processes.append(process)
        return Group(processes, log)

    def add(self, arguments: Sequence[str], further: Mapping[str, str]) -> int:
        """Starts one more process, in a launch of its own; returns its number here."""
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        environment = {**alone, "MASTER_PORT": str(free_port()), **further}
        target_arguments = (environment, [*arguments], str(self.log))
        process = forked_with_torch(__name__).Process(target=_rank_main, args=target_arguments)
        process.start()
        self._processes.append(process)
        return self.size - 1

    @property
    def size(self) -> int:
        return len(self._processes)

    def is_over(self) -> bool:
        """Whether some rank has ended."""
        return any(not process.is_alive() for process in self._processes)

    def alive(self) -> list[int]:
        """The ranks that have not ended."""
        return [rank for rank, process in enumerate(self._processes) if _is_alive(process)]

    def freeze(self) -> None:
        """Stops all ranks where they are."""
        self._send(signal.SIGSTOP, range(self.size))

    def go_on(self) -> None:
        """Lets stopped ranks run."""
        self._send(signal.SIGCONT, range(self.size))

    def kill(self, ranks: Iterable[int]) -> None:
        """Kills some ranks, which leaves them no time for anything; the others run on."""
        victims = list(ranks)
        self._send(signal.SIGKILL, victims)
        for rank in victims:
            self._processes[rank].join()
        self.go_on()

    def end(self, seconds: float = _SECONDS_TO_NOTICE) -> None:
        """Waits until all have ended, and ends those that do not within these seconds."""
        deadline = time.monotonic() + seconds
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._send(signal.SIGKILL, range(self.size))
        for process in self._processes:
            process.join()

    def wait(self) -> int:
        """Waits for all; the largest status, where a killed rank's is its signal's number."""
        for process in self._processes:
            process.join()
        return max(abs(process.exitcode or 0) for process in self._processes)

    def wait_for_rest(self) -> None:
        """Waits for those that are not killed, also if they have begun again by `exec`."""
        while self.alive():
            time.sleep(0.05)

    def told(self) -> Start:
        """What the log says of where the run went on."""
        text = self.log.read_text()
        if match := _RESUMED.search(text):
            return Start(int(match[1]))
        return Start(0 if _NEW.search(text) else None)

    def _send(self, number: signal.Signals, ranks: Iterable[int]) -> None:
        for rank in ranks:
            process = self._processes[rank]
            if process.pid is not None and _is_alive(process):
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)


def _is_alive(process: BaseProcess) -> bool:
    """Whether the process runs; `is_alive` is false once it has begun again by `exec`."""
    with suppress(OSError):
        text = Path(f"/proc/{process.pid}/stat").read_text()
        return text.rpartition(")")[2].split()[0] != "Z"
    return False


def _rank_main(environment: dict[str, str], arguments: list[str], log: str) -> None:
    """One rank, as `python pretrain_gpt.py` with these variables."""
    os.environ.update(environment)
    sys.orig_argv[1:] = ["pretrain_gpt.py", *arguments]
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())
    run_main(train.main, arguments)
