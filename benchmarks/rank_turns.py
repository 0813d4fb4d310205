"""Groups of ranks that run a step on request, so that several groups can be timed turn by turn."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch.distributed as dist

from megalite.config import ParallelConfig
from megalite.distributed.local_ranks import run_ranks
from megalite.distributed.topology import Topology

_TICKS = os.sysconf("SC_CLK_TCK")


class Turn(NamedTuple):
    """One step of one rank, or of a group: then the slowest rank's time and everybody's CPU seconds.

    Attributes:
        result: what the step returned, on rank 0.
    """

    seconds: float
    cpu_seconds: float
    result: Any


class Ranks:
    """Ranks of this machine that wait, at no cost, for a request to run a step.

    Args:
        build: called on each rank with its topology and `args`; it gives the step. Importable by name.
    """

    def __init__(
        self, build: Callable[..., Callable[[], Any]], parallel: ParallelConfig, world_size: int, *args: Any
    ) -> None:
        pipes = [Pipe() for _ in range(world_size)]
        self._ends = [mine for mine, _ in pipes]
        theirs = [other for _, other in pipes]
        self._pool = ThreadPoolExecutor(1)
        self._running: Future[Any] = self._pool.submit(
            run_ranks, _serve, parallel.mesh, world_size, theirs, build, args, timeout=86400.0
        )

    def turn(self) -> Turn:
        """Run one step on every rank.

        Raises:
            RankError: a rank failed.
        """
        for end in self._ends:
            end.send(True)
        turns: dict[int, Turn] = {}
        while len(turns) < len(self._ends):
            waiting = [end for rank, end in enumerate(self._ends) if rank not in turns]
            for ready in wait(waiting, timeout=1.0):
                assert isinstance(ready, Connection)
                turns[self._ends.index(ready)] = ready.recv()
            if self._running.done():
                self._running.result()
        seconds = max(turn.seconds for turn in turns.values())
        return Turn(seconds, sum(turn.cpu_seconds for turn in turns.values()), turns[0].result)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stop the ranks; raise the first of several failures."""
        for end in self._ends:
            with suppress(OSError):  # a rank that failed is gone
                end.send(False)
        with suppress(Exception) if kind else nullcontext():
            self._running.result()
        self._pool.shutdown()


def _serve(
    topology: Topology, ends: list[Connection], build: Callable[..., Callable[[], Any]], args: tuple[Any, ...]
) -> None:
    step = build(topology, *args)
    end = ends[topology.rank]
    while end.recv():
        cpu = time.process_time()
        dist.barrier()
        start = time.perf_counter()
        result = step()
        seconds = time.perf_counter() - start
        end.send(Turn(seconds, time.process_time() - cpu, result))


class ForeignCPU:
    """What share of the machine's cores others used while ours took a turn."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.busy = busy_seconds()

    def share(self, own_cpu_seconds: float) -> float:
        """Return the share of all cores since this object was created: 0 on an idle machine."""
        available = (time.perf_counter() - self.start) * (os.cpu_count() or 1)
        return max(0.0, (busy_seconds() - self.busy - own_cpu_seconds) / available)


def busy_seconds() -> float:
    """Return the seconds for which the machine's cores worked for any process so far, in sum (Linux).

    Interrupts are left out: the messages of our own ranks make most of them, and no process is charged.
    """
    with open("/proc/stat", encoding="ascii") as stat:
        user, nice, system, _idle, _iowait, _irq, _softirq, steal = map(int, stat.readline().split()[1:9])
    return (user + nice + system + steal) / _TICKS
