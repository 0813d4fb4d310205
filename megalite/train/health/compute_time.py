"""What a rank computes itself, without its waits for others: all ranks' iterations take the same time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_SCHEDULED = Path("/proc/thread-self/schedstat")
"""Nanoseconds that this thread ran, nanoseconds that it was ready to, and how often (proc(5))."""
_COMMUNICATION = "nccl"
"""In the name of every kernel of NCCL, which runs until the other ranks are there."""


class ComputeClock(Protocol):
    """Measures iterations."""

    def iteration(self, is_last: bool) -> AbstractContextManager[None]:
        """The block is an iteration; the last one before `take` or not."""

    def take(self) -> float:
        """Seconds of an iteration that this rank computed; starts anew."""


class HostClock:
    """Time in which the main thread computes, or is ready to and finds no free core.

    Where it waits for other ranks it sleeps, as gloo's waits do, and as for a disk: neither counts.

    Args:
        now: seconds of this thread that count, from any origin.
    """

    def __init__(self, now: Callable[[], float] | None = None) -> None:
        self._now = now or own_seconds
        self._total = 0.0
        self._num_iterations = 0

    @contextmanager
    def iteration(self, is_last: bool) -> Iterator[None]:
        """Adds the block to the interval."""
        begin = self._now()
        try:
            yield
        finally:
            self._total += self._now() - begin
            self._num_iterations += 1

    def take(self) -> float:
        """Mean of the iterations since the last call."""
        mean = self._total / max(self._num_iterations, 1)
        self._total, self._num_iterations = 0.0, 0
        return mean


def own_seconds() -> float:
    """Seconds that the calling thread has run, and waited for a core where the system tells it."""
    try:
        delay = int(_SCHEDULED.read_text().split()[1])
    except (OSError, IndexError, ValueError):  # not Linux, or a kernel without these figures
        delay = 0
    return time.thread_time() + 1e-9 * delay


class DeviceClock:
    """Time of a GPU's kernels in an interval's last iteration, without NCCL's.

    Events around parts of an iteration would count the waits in collectives between them. The profiler tells
    kernels apart; it runs in that one iteration.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds = 0.0

    @contextmanager
    def iteration(self, is_last: bool) -> Iterator[None]:
        """Measures the block if it is the last."""
        if not is_last:
            yield
            return
        torch.cuda.synchronize(self._device)
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            yield
            torch.cuda.synchronize(self._device)
        assert profiled.profiler is not None
        events = profiled.profiler.kineto_results.events()
        self._seconds = 1e-9 * sum(
            event.duration_ns()
            for event in events
            if event.device_type() == DeviceType.CUDA and _COMMUNICATION not in event.name().lower()
        )

    def take(self) -> float:
        """Of the iteration that was measured last."""
        return self._seconds
