"""Run a program on several ranks of this machine, with a timeout."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

GRACE_SECONDS = 15.0
"""Time for the other ranks to report after one has failed, and for each to end after a signal."""
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Outcome:
    """End of the ranks of a run.

    Attributes:
        statuses: exit status of each rank, as in `subprocess`; None if it had to be killed.
        timed_out: whether the ranks did not finish in time.
    """

    statuses: tuple[int | None, ...]
    timed_out: bool

    @property
    def is_good(self) -> bool:
        return not self.timed_out and not any(status != 0 for status in self.statuses)


def run_program(command: Sequence[str], num_ranks: int, folder: Path, timeout: float) -> Outcome:
    """Start `command` once per rank, with the environment that torchrun would set, and wait.

    No rank outlives the call, however it ends. Each rank's output goes to ``folder/rank_N.log``.

    Args:
        timeout: seconds until the ranks are killed.
    """
    with _started(command, num_ranks, folder) as ranks:
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            statuses = [rank.poll() for rank in ranks]
            if None not in statuses:
                return Outcome(tuple(statuses), timed_out=False)
            if any(statuses):
                _wait(ranks, GRACE_SECONDS)
                return Outcome(tuple(rank.poll() for rank in ranks), timed_out=False)
            time.sleep(_POLL_SECONDS)
        return Outcome(tuple(rank.poll() for rank in ranks), timed_out=True)


@contextmanager
def _started(command: Sequence[str], num_ranks: int, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    ranks: list[subprocess.Popen[bytes]] = []
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    try:
        for number in range(num_ranks):
            sizes = {
                "WORLD_SIZE": num_ranks,
                "LOCAL_WORLD_SIZE": num_ranks,
                "RANK": number,
                "LOCAL_RANK": number,
            }
            with (folder / f"rank_{number}.log").open("wb") as log:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, *command],
                        env={**os.environ, **rendezvous, **{name: str(size) for name, size in sizes.items()}},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # so that its children can be killed with it
                    )
                )
        yield ranks
    finally:
        for sent in (signal.SIGTERM, signal.SIGKILL):
            for rank in ranks:
                _signal(rank, sent)
            _wait(ranks, GRACE_SECONDS)


def _signal(rank: subprocess.Popen[bytes], sent: signal.Signals) -> None:
    # Signal the whole group: children of a rank may outlive it.
    with suppress(ProcessLookupError):
        os.killpg(rank.pid, sent)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    end = time.monotonic() + seconds
    for rank in ranks:
        try:
            rank.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            continue


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
