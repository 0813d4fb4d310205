"""Name the slowest rank by its compute time, without waits: all ranks' iterations take equally long."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch.profiler import DeviceType, ProfilerActivity, profile

from megalite.config import LoggingConfig
from megalite.distributed.axes import coordinates_text
from megalite.distributed.axis import DEVICE, PROFILER, EventStack
from megalite.distributed.topology import Topology
from megalite.train.loop import Callback, TrainingLoop
from megalite.train.train_step import StepResult
from megalite.utils.errors import UserError
from megalite.utils.log import THIS_RANK, log


@dataclass(frozen=True)
class ComputeTime:
    """Compute time of one rank in an interval.

    Attributes:
        coordinates: the rank's coordinate along each axis.
        seconds: seconds per iteration, without waits for other ranks.
    """

    rank: int
    host: str
    coordinates: Mapping[str, int]
    seconds: float


def straggler_line(times: Sequence[ComputeTime]) -> str:
    """Name the rank that is slowest compared to the others of its stage.

    Stages differ by design, so ranks are compared within their stage. If each stage has one rank, all ranks
    are compared.

    Args:
        times: compute times of all ranks, at least two.
    """
    stages: dict[int, list[ComputeTime]] = {}
    for each in times:
        stages.setdefault(each.coordinates["pp"], []).append(each)
    groups = list(stages.values()) if len(stages) < len(times) else [list(times)]
    candidates = []
    for group in groups:
        slowest = max(group, key=lambda each: each.seconds)
        others = [each for each in group if each is not slowest]
        median = statistics.median(each.seconds for each in others)
        candidates.append((slowest.seconds / max(median, 1e-9), median, slowest, others))
    ratio, median, slowest, others = max(candidates, key=lambda candidate: candidate[0])
    fastest = min(others, key=lambda each: each.seconds)
    of_stage = " of its stage" if 1 < len(stages) < len(times) else ""
    compared = f"the other rank{of_stage}" if len(others) == 1 else f"the {len(others)} others{of_stage}"
    return (
        f"straggler: rank {slowest.rank} ({slowest.host}, {coordinates_text(slowest.coordinates)}) computes "
        f"{1e3 * slowest.seconds:.1f} ms an iteration, {ratio:.2f} x the median "
        f"{1e3 * median:.1f} ms of {compared}; fastest: rank {fastest.rank} "
        f"{1e3 * fastest.seconds:.1f} ms"
    )


class StragglerLog:
    """Log of the slowest rank every `interval` iterations; every rank calls it.

    Args:
        clock: measures the compute time; None, or an interval of None, measures nothing.
    """

    def __init__(self, interval: int | None, topology: Topology, clock: ComputeClock | None) -> None:
        self._interval = interval
        self._topology = topology
        self._clock = clock

    @contextmanager
    def iteration(self, number: int) -> Iterator[None]:
        """Measure the block, which runs this iteration, counted from 1."""
        if self._clock is None or self._interval is None:
            yield
            return
        is_last = number % self._interval == 0
        with self._clock.iteration(is_last):
            yield
        if is_last:
            self._log_slowest(self._clock.take())

    def _log_slowest(self, seconds: float) -> None:
        topology = self._topology
        mine = ComputeTime(topology.rank, socket.gethostname(), topology.coordinates, seconds)
        times: list[ComputeTime | None] = [None] * topology.world_size
        with topology.world.wait("all-gather", "compute times"):
            dist.all_gather_object(times, mine)
        if topology.is_reporter and topology.world_size > 1:
            log.info(straggler_line([each for each in times if each]), extra=THIS_RANK)


def straggler_log(config: LoggingConfig, topology: Topology) -> StragglerLog:
    """Create the log of --log-straggler-interval.

    Raises:
        UserError: another option uses the profiler, which this one needs on GPUs; on every rank.
    """
    interval, device = config.log_straggler_interval, topology.device
    if interval is None or topology.world_size == 1:
        return StragglerLog(None, topology, None)
    flag = "--profile" if config.profile else "--profile-execution"
    if device.type == "cuda" and (config.profile or config.profile_execution):
        raise UserError(
            f"--log-straggler-interval and {flag} both need the profiler on a GPU: omit one of them"
        )
    clock: ComputeClock = DeviceClock(device, topology.events) if device.type == "cuda" else HostClock()
    return StragglerLog(interval, topology, clock)


_SCHEDULER_STATISTICS = Path("/proc/thread-self/schedstat")
"""Scheduler statistics of this thread: nanoseconds on a core and waiting for one, time slices (proc(5))."""
_NCCL = "nccl"
"""Part of the name of each NCCL kernel, which runs until the other ranks have started it too."""


class ComputeClock(Protocol):
    """Clock that measures iterations."""

    def iteration(self, is_last: bool) -> AbstractContextManager[None]:
        """Measure the block, an iteration; `is_last`: `take` is called after it."""

    def take(self) -> float:
        """Return the seconds that this rank computed in an iteration, and start a new interval."""


class HostClock:
    """Clock of the time in which the main thread computes, or waits for a free core.

    It sleeps while it waits for other ranks, with gloo, or for a disk: neither counts.

    Args:
        now: returns the seconds of this thread that count, from any origin.
    """

    def __init__(self, now: Callable[[], float] | None = None) -> None:
        self._now = now or thread_seconds
        self._total = 0.0
        self._num_iterations = 0

    @contextmanager
    def iteration(self, is_last: bool) -> Iterator[None]:
        """Add the block to the interval."""
        begin = self._now()
        try:
            yield
        finally:
            self._total += self._now() - begin
            self._num_iterations += 1

    def take(self) -> float:
        """Return the mean of the iterations since the last call."""
        mean = self._total / max(self._num_iterations, 1)
        self._total, self._num_iterations = 0.0, 0
        return mean


def thread_seconds() -> float:
    """Return the seconds that the calling thread ran, and waited for a core if the system reports that."""
    try:
        delay = int(_SCHEDULER_STATISTICS.read_text().split()[1])
    except (OSError, IndexError, ValueError):  # not Linux, or a kernel without these figures
        delay = 0
    return time.thread_time() + 1e-9 * delay


class DeviceClock:
    """Clock of the kernels of an interval's last iteration on a GPU, without NCCL's.

    CUDA events around parts of an iteration would include the waits in collectives between them. The profiler
    lists single kernels; it runs in that one iteration.

    Args:
        events: the stack that the profiler's work is posted to.
    """

    def __init__(self, device: torch.device, events: EventStack) -> None:
        self._device = device
        self._events = events
        self._seconds = 0.0

    @contextmanager
    def iteration(self, is_last: bool) -> Iterator[None]:
        """Measure the block if it is the last."""
        if not is_last:
            yield
            return
        profiler = profile(activities=[ProfilerActivity.CUDA])
        self._synchronize()
        with self._events.during(PROFILER):
            profiler.start()
        try:
            yield
            self._synchronize()
        finally:
            with self._events.during(PROFILER):
                profiler.stop()
        assert profiler.profiler is not None
        results = profiler.profiler.kineto_results
        assert results is not None
        self._seconds = 1e-9 * sum(
            event.duration_ns()
            for event in results.events()
            if event.device_type() == DeviceType.CUDA and _NCCL not in event.name().lower()
        )

    def take(self) -> float:
        """Return the seconds of the iteration that was measured last."""
        return self._seconds

    def _synchronize(self) -> None:
        with self._events.during(DEVICE):
            torch.cuda.synchronize(self._device)


class Stragglers(Callback):
    """Log of the slowest rank every --log-straggler-interval iterations."""

    def on_start(self, loop: TrainingLoop) -> None:
        self._log = straggler_log(loop.trainer.config.logging, loop.trainer.topology)
        self._iteration = ExitStack()

    def before_step(self, loop: TrainingLoop) -> None:
        self._iteration.enter_context(self._log.iteration(loop.next_iteration))

    def after_step(self, loop: TrainingLoop, result: StepResult) -> None:
        self._iteration.close()
