"""Measure time on a device: on a CPU with the wall clock, on a GPU with events in its own queue."""

from __future__ import annotations

import time
from typing import Any

import torch

QUEUE_CYCLES = 20_000_000
"""Time for which a GPU waits before timed work, so that all kernels are queued: about 10 ms."""


class Clock:
    """Marks points between operations, and returns the seconds between two of them.

    On a GPU this is the GPU's own time, without the host's launches: `start` makes the GPU wait.

    Args:
        by_process: on a CPU, use the process' CPU time, which other processes disturb less.
    """

    def __init__(self, device: torch.device, by_process: bool = False) -> None:
        self.is_cuda = device.type == "cuda"
        self.now = time.process_time if by_process else time.perf_counter

    def start(self) -> None:
        """Wait for earlier work."""
        if self.is_cuda:
            torch.cuda.synchronize()
            torch.cuda._sleep(QUEUE_CYCLES)

    def mark(self) -> Any:
        """Return the current point in time."""
        if not self.is_cuda:
            return self.now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, first: Any, second: Any) -> float:
        """Return the seconds between two marks."""
        if not self.is_cuda:
            between: float = second - first
            return between
        torch.cuda.synchronize()
        return float(first.elapsed_time(second)) / 1e3
