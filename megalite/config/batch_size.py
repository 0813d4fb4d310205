"""The global batch size of each iteration, which may ramp up at the start of a run."""

from __future__ import annotations

from collections.abc import Iterator


class BatchSize:
    """Compute the global batch size from the samples consumed so far: there is no state to save.

    A ramp-up begins with START samples and grows by INCREMENT in equal steps over the first SAMPLES samples
    until it reaches the full batch (Megatron-LM's formula, rounding included).

    Args:
        full: the global batch size at the end of the ramp-up, or always without one.
        rampup: START, INCREMENT and SAMPLES; START plus a number of increments is `full`.
    """

    def __init__(self, full: int, rampup: tuple[int, ...] | None = None) -> None:
        self.full = full
        self.start, self.increment, self._rampup_samples = rampup or (full, 0, 0)
        self._num_steps = (full - self.start) // self.increment if rampup else 0

    def __call__(self, consumed_samples: int) -> int:
        """Return the global batch size of the iteration after `consumed_samples` samples."""
        if self._num_steps == 0 or consumed_samples > self._rampup_samples:
            return self.full
        return self.start + int(consumed_samples / (self._rampup_samples / self._num_steps)) * self.increment

    def consumed_before(self, iteration: int) -> int:
        """Return the samples consumed before `iteration`, counted from 1."""
        for number, consumed in self._rampup():
            if number == iteration - 1:
                return consumed
        return consumed + (iteration - 1 - number) * self.full

    def num_iterations(self, num_samples: int) -> int:
        """Return the largest number of iterations that consume at most `num_samples` samples."""
        for number, consumed in self._rampup():
            if consumed + self(consumed) > num_samples:
                return number
        return number + (num_samples - consumed) // self.full

    def _rampup(self) -> Iterator[tuple[int, int]]:
        """Yield iterations done and samples consumed, from the start until the batch is full."""
        number, consumed = 0, 0
        while self(consumed) != self.full:
            yield number, consumed
            consumed += self(consumed)
            number += 1
        yield number, consumed
