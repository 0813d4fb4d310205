"""Measure the time that a rank computes, without its waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch.profiler import DeviceType, ProfilerActivity, profile

from megalite.distributed.axis import DEVICE, PROFILER, EventStack

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
