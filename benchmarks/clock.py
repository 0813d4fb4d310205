"""Times on a device: of a CPU by the wall's clock, of a GPU by events in its own queue."""

from __future__ import annotations

import time
from typing import Any

import torch

QUEUE_CYCLES = 20_000_000
"""That a GPU waits for before what is timed, so that its kernels are all in the queue: about 10 ms."""


class Clock:
    """Marks points between operations, and tells the seconds between two of them.

    On a GPU they are those that the GPU takes, without the host's for launching: `start` lets it wait.

    Args:
        by_process: on a CPU, count the process' own seconds, which a busy neighbour changes less.
    """

    def __init__(self, device: torch.device, by_process: bool = False) -> None:
        self.is_cuda = device.type == "cuda"
        self.now = time.process_time if by_process else time.perf_counter

    def start(self) -> None:
        """Waits for what was begun before."""
        if self.is_cuda:
            torch.cuda.synchronize()
            torch.cuda._sleep(QUEUE_CYCLES)

    def mark(self) -> Any:
        """A point in time."""
        if not self.is_cuda:
            return self.now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, first: Any, second: Any) -> float:
        """Between two marks."""
        if not self.is_cuda:
            between: float = second - first
            return between
        torch.cuda.synchronize()
        return float(first.elapsed_time(second)) / 1e3
