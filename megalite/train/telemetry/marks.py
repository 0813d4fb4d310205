"""Moments of a rank's work: of its host, or of the stream that its GPU computes on."""

from __future__ import annotations

import time
from typing import Any, Protocol, TypeVar

import torch

M = TypeVar("M")


class Marks(Protocol[M]):
    """Gives moments, and the time between two of them once both are over."""

    def now(self) -> M:
        """This moment; waits for nothing."""

    def seconds(self, begin: M, end: M) -> float:
        """From one moment to another; on a GPU it waits until the second has come."""


class HostMarks:
    """Moments of the host's clock, which on Linux all processes of a machine share."""

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class StreamMarks:
    """Events in the current CUDA stream: they pass when the kernels launched before them are done.

    What lies between two of them is time of the stream, in which it computed or had to wait: for a collective
    on another stream, or for the host to launch. Nothing is waited for, so that the run stays as it is.
    """

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def marks_for(device: torch.device) -> Marks[Any]:
    """Those that tell when work on this device begins and ends."""
    return StreamMarks() if device.type == "cuda" else HostMarks()
