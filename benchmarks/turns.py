"""Processes that run a training step on request, so that several can be timed turn by turn."""

from __future__ import annotations

import multiprocessing
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from megalite.config import Config
from megalite.distributed.rendezvous import Launch
from megalite.distributed.topology import Topology
from megalite.train.telemetry.metrics import measure_memory
from megalite.utils.hardware import process_settings

NUM_WARMUP = 3
"""Turns of each process that are not counted: memory is taken, and what is compiled is compiled."""


class Work(NamedTuple):
    """The work of a process in its turns.

    Attributes:
        step: one training step; it returns the loss.
        num_parameters: number of parameters that it trains.
    """

    step: Callable[[], float]
    num_parameters: int


Build = Callable[[Config, Topology], Work]
"""Makes the work of a process in that process; a function of a module, so that it can be named there."""


class Turn(NamedTuple):
    """One step.

    Attributes:
        cpu_seconds: CPU seconds of the process' threads, which other processes disturb less.
        peak_bytes: the most memory that the process has taken so far, of its GPU where it has one.
    """

    seconds: float
    cpu_seconds: float
    loss: float
    peak_bytes: float


class LeftOutError(Exception):
    """A process cannot do its work here; the text says why in a line."""


class Worker:
    """A process that builds its work, then waits at no cost for a request to take a turn.

    Attributes:
        num_parameters: number of parameters that it trains.

    Raises:
        LeftOutError: it cannot be built here.
    """

    def __init__(self, build: Build, config: Config) -> None:
        context = multiprocessing.get_context("spawn")
        self._end, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, build, config), daemon=True)
        self._process.start()
        other.close()
        self.num_parameters: int = self._answer()

    def turn(self) -> Turn:
        """Take a step.

        Raises:
            LeftOutError: it failed.
        """
        self._end.send(True)
        turn: Turn = self._answer()
        return turn

    def close(self) -> None:
        """End the process, and with it its memory."""
        self._end.close()
        self._process.join()

    def _answer(self):  # type: ignore[no-untyped-def]  # whatever the process sends
        try:
            answer = self._end.recv()
        except EOFError:
            self._process.join()
            raise LeftOutError(f"its process ended with status {self._process.exitcode}") from None
        if isinstance(answer, LeftOutError):
            self._process.join()
            raise answer
        return answer


def _serve(end, build: Build, config: Config) -> None:  # type: ignore[no-untyped-def]  # a Connection
    """The process: one message when it is built, one for each turn."""
    try:
        with one_rank(config) as topology:
            work = build(config, topology)
            end.send(work.num_parameters)
            while end.recv():
                start, cpu_start = _now(topology.device), time.process_time()
                loss = work.step()
                seconds, cpu_seconds = _now(topology.device) - start, time.process_time() - cpu_start
                peak_bytes = measure_memory(topology.device).reserved * 2.0**20
                end.send(Turn(seconds, cpu_seconds, loss, peak_bytes))
    except (EOFError, KeyboardInterrupt):
        return  # nobody asks any more
    except LeftOutError as error:
        end.send(error)
    except Exception as error:
        end.send(LeftOutError(_in_a_line(error)))


def _now(device: torch.device) -> float:
    """Return the time after the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _in_a_line(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    first = (str(error).strip() or "no message").splitlines()[0]
    return (
        f"{type(error).__name__}: {first} ({where.filename.rpartition('site-packages/')[2]}:{where.lineno})"
    )


@contextmanager
def one_rank(config: Config) -> Iterator[Topology]:
    """Return the topology of one process: the only rank, or rank 0 of a fake tensor-parallel group."""
    parallel, tp = config.parallel, config.parallel.tp
    if tp == 1:
        with Topology.start(parallel.mesh, Launch(0, 1, 0, 1)) as topology:
            yield topology
        return
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    process_settings.limit_threads(parallel.num_threads, 1)
    if parallel.keep_freed_memory:
        process_settings.keep_freed_memory()
    with Topology.fake(parallel.mesh, tp, 0, device) as topology:
        yield topology


class Measured(NamedTuple):
    """The result of a process's counted turns.

    Attributes:
        seconds, cpu_seconds: seconds of each counted turn.
        losses: losses of all turns, including the warm-up.
    """

    seconds: list[float]
    cpu_seconds: list[float]
    losses: list[float]
    peak_bytes: float
    num_parameters: int

    @property
    def median(self) -> float:
        """Return the seconds of a turn."""
        return statistics.median(self.seconds)

    @property
    def cpu_median(self) -> float:
        """CPU seconds of a turn."""
        return statistics.median(self.cpu_seconds)


def take_turns(
    builds: Mapping[str, tuple[Build, Config]],
    rounds: int,
    left_out: Callable[[str, str], None],
    warmup: int = NUM_WARMUP,
    together: bool = True,
) -> dict[str, Measured]:
    """Run each work once a round.

    Args:
        rounds: number of rounds that count.
        left_out: called with the name of a program that cannot run, and the reason; the others continue.
        together: False where memory is for one process at a time: then each takes all its turns before the
            next is built.
    """
    if not together:
        alone = (take_turns({name: build}, rounds, left_out, warmup) for name, build in builds.items())
        return {name: measured for found in alone for name, measured in found.items()}
    workers: dict[str, Worker] = {}
    turns: dict[str, list[Turn]] = {}
    try:
        for name, (build, config) in builds.items():
            try:
                workers[name], turns[name] = Worker(build, config), []
            except LeftOutError as error:
                left_out(name, str(error))
        for _ in range(warmup + rounds):
            for name in list(workers):
                try:
                    turns[name].append(workers[name].turn())
                except LeftOutError as error:
                    left_out(name, str(error))
                    workers.pop(name).close()
        return {name: _measured(turns[name], warmup, worker) for name, worker in workers.items()}
    finally:
        for worker in workers.values():
            worker.close()


def _measured(turns: Sequence[Turn], warmup: int, worker: Worker) -> Measured:
    return Measured(
        [turn.seconds for turn in turns[warmup:]],
        [turn.cpu_seconds for turn in turns[warmup:]],
        [turn.loss for turn in turns],
        max(turn.peak_bytes for turn in turns),
        worker.num_parameters,
    )
