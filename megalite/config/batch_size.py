"""The global batch size of each iteration, which may ramp up, and settings that change in steps of a run."""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Iterator, Sequence

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


class BatchSize:
    """Global batch size by the samples consumed so far: there is no state to save.

    A ramp-up begins with START samples and grows by INCREMENT in equal steps over the first SAMPLES samples
    until it reaches the full batch (Megatron-LM's formula, rounding included). A step changes the size after
    a given number of consumed samples.

    Args:
        full: the global batch size after the ramp-up or the last step; without either, of every iteration.
        rampup: START, INCREMENT and SAMPLES; START plus a number of increments is `full`.
        steps: pairs of consumed samples and the size from there on, in order. The first pair begins at 0, and
            the last one's size is `full`. See `schedule_steps`.
    """

    def __init__(
        self, full: int, rampup: tuple[int, ...] | None = None, steps: Sequence[tuple[int, int]] = ()
    ) -> None:
        self.full = full
        self.start, self.increment, self._rampup_samples = rampup or (full, 0, 0)
        self._num_steps = (full - self.start) // self.increment if rampup else 0
        self._steps = steps
        if steps:
            self.start = steps[0][1]

    def __call__(self, consumed_samples: int) -> int:
        """Return the global batch size of the iteration after `consumed_samples` samples."""
        if self._steps:
            return value_at(self._steps, consumed_samples)
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
        """Yield the iterations done and the samples consumed, until the batch reaches its full size."""
        number, consumed = 0, 0
        while self(consumed) != self.full or (self._steps and consumed < self._steps[-1][0]):
            yield number, consumed
            consumed += self(consumed)
            number += 1
        yield number, consumed


def schedule_steps(schedule: Sequence[str] | None, seq_length: int) -> list[tuple[int, int]]:
    """Parse a schedule into steps: consumed samples, and the size from there on.

    Args:
        schedule: entries TOKENS:SIZE as in Megatron-LM, such as 2.4B:320; a string may hold several. A size
            is a batch size or a sequence length.
        seq_length: tokens per sample, to convert the thresholds to samples.

    Returns:
        The steps; empty if an entry has another form, or if the thresholds do not rise from 0.
    """
    steps = []
    for entry in " ".join(schedule or ()).replace(",", " ").upper().split():
        match = re.fullmatch(r"(\d{1,18}|\d{0,18}\.\d{1,18})([KMBT]?):(\d{1,18})", entry)
        if match is None:
            return []
        tokens, suffix, size = match.groups()
        steps.append((int(float(tokens) * _SUFFIXES[suffix]) // seq_length, int(size)))
    thresholds = [samples for samples, _ in steps]
    rises = all(samples < later for samples, later in itertools.pairwise(thresholds))
    return steps if thresholds[:1] == [0] and rises and all(size > 0 for _, size in steps) else []


def value_at(steps: Sequence[tuple[int, int]], consumed_samples: int) -> int:
    """Return the size of the iteration after `consumed_samples` samples, from `schedule_steps`."""
    return steps[bisect.bisect(steps, consumed_samples, key=lambda step: step[0]) - 1][1]
