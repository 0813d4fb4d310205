"""Where an iteration's time goes, by named parts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass
class _Total:
    seconds: float = 0.0
    num_uses: int = 0


class Timers:
    """Sums the wall time spent in parts of the program: ``with timers("forward-backward"): ...``.

    Args:
        wait_for: a CUDA device that each timer waits for at both its ends, so that kernels count where they
            belong; the waits cost overlap. None: a timer tells how long the host was busy there.
    """

    def __init__(self, wait_for: torch.device | None = None) -> None:
        self._wait_for = wait_for if wait_for is not None and wait_for.type == "cuda" else None
        self._totals: dict[str, _Total] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Adds the block's time to the timer `name`, also where the block raises."""
        start = self._now()
        try:
            yield
        finally:
            total = self._totals.setdefault(name, _Total())
            total.seconds += self._now() - start
            total.num_uses += 1

    def take(self, num_iterations: int = 1) -> dict[str, float]:
        """Milliseconds of each timer used since the last call, and starts anew.

        What every iteration uses, once or several times, is told as the mean of an iteration; what is used
        less often (an evaluation, a save) as the mean of one use.
        """
        totals, self._totals = self._totals, {}
        return {
            name: 1e3 * total.seconds / min(total.num_uses, num_iterations) for name, total in totals.items()
        }

    def _now(self) -> float:
        if self._wait_for is not None:
            torch.cuda.synchronize(self._wait_for)
        return time.perf_counter()
