"""The global batch of each iteration, which may grow over the first part of a run."""

from __future__ import annotations

from collections.abc import Iterator


class BatchSize:
    """Samples of an iteration, a pure function of the samples consumed before it: no state to save.

    A ramp-up begins with START samples and adds INCREMENT each time that another SAMPLES / steps of them are
    consumed, in as many steps as lead to the full batch (Megatron-LM's formula, rounding included).

    Args:
        full: the global batch at the end of the ramp-up, or always where there is none.
        rampup: START, INCREMENT and SAMPLES; START plus whole increments is `full`.
    """

    def __init__(self, full: int, rampup: tuple[int, ...] | None = None) -> None:
        self.full = full
        self.start, self.increment, self._rampup_samples = rampup or (full, 0, 0)
        self._num_steps = (full - self.start) // self.increment if rampup else 0

    def __call__(self, consumed_samples: int) -> int:
        """The global batch of the iteration that follows `consumed_samples` samples."""
        if self._num_steps == 0 or consumed_samples > self._rampup_samples:
            return self.full
        return self.start + int(consumed_samples / (self._rampup_samples / self._num_steps)) * self.increment

    def consumed_before(self, iteration: int) -> int:
        """Samples consumed before `iteration`, counted from 1."""
        for number, consumed in self._rampup():
            if number == iteration - 1:
                return consumed
        return consumed + (iteration - 1 - number) * self.full

    def num_iterations(self, num_samples: int) -> int:
        """The most iterations that together consume no more than `num_samples` samples."""
        for number, consumed in self._rampup():
            if consumed + self(consumed) > num_samples:
                return number
        return number + (num_samples - consumed) // self.full

    def _rampup(self) -> Iterator[tuple[int, int]]:
        """Iterations done and samples consumed, from none to where the batch stays full."""
        number, consumed = 0, 0
        while not self._is_full(consumed):
            yield number, consumed
            consumed += self(consumed)
            number += 1
        yield number, consumed

    def _is_full(self, consumed_samples: int) -> bool:
        return self(consumed_samples) == self.full
