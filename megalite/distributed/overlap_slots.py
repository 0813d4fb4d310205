"""Overlap two computations: one computes while messages of the other are in flight."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from threading import Semaphore, Thread
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class OverlapSlots:
    """Two computations that alternate: each calls `yield_slot` before it waits for messages in flight.

    Only one of them runs at a time. They switch only in `yield_slot` and when one ends, so every
    rank launches its collectives in the same order, and a GPU runs the kernels of both on one stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slot = 0  # number of the computation that runs
        self._may_run = (Semaphore(0), Semaphore(0))
        self._are_two = False

    def run(self, first: Callable[[], T], second: Callable[[], T]) -> list[T]:
        """Run two computations, and return the results of both; the second one runs in a thread.

        An error of the first one is raised at once, since the other can wait for messages that never come.
        """
        results: list[Any] = []

        def run_second() -> None:
            self._may_run[1].acquire()
            try:
                with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
                    results.append(second())
            except BaseException as error:
                results.append(error)
            self._end()

        thread = Thread(target=run_second, daemon=True)
        self._slot, self._may_run, self._are_two = 0, (Semaphore(0), Semaphore(0)), True
        thread.start()
        try:
            own = first()
        finally:
            self._end()
        thread.join()
        if isinstance(results[0], BaseException):
            raise results[0]
        return [own, results[0]]

    def yield_slot(self) -> None:
        """Let the other computation run until it yields or ends; without another one, do nothing."""
        if self._are_two:
            mine, self._slot = self._slot, 1 - self._slot
            self._may_run[self._slot].release()
            self._may_run[mine].acquire()

    def _end(self) -> None:
        """Let the other computation run to its end."""
        self._slot, self._are_two = 1 - self._slot, False
        self._may_run[self._slot].release()
