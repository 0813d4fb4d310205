"""The learning rate's course over the run, with Megatron's formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megalite.config import OptimizerConfig

DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (math.cos(math.pi * progress) + 1.0),
    "exponential": lambda progress: 2.0 * 0.5**progress - 1.0,
    "minus_sqrt": lambda progress: 1.0 - math.sqrt(progress),
    "constant": lambda progress: 1.0,
}
"""Share of the way from the minimum up to the peak, by the progress through the decay in [0, 1]."""


@dataclass(frozen=True)
class LearningRate:
    """Warm-up, then decay; a pure function of the position in the run, so a resumed run needs no state.

    The update that brings the run to a position has the rate that Megatron logs for it. Megatron itself
    updates with the one before, so that its first update, at the start of warm-up, has rate 0.

    Args:
        run_length: iterations or samples of the run, the decay's length where the config names none.
        unit: that the run is counted in, here and in the config's fields.
    """

    config: OptimizerConfig
    run_length: int
    unit: Literal["iters", "samples"] = "iters"

    @property
    def decay_length(self) -> int:
        """Position at which the decay ends."""
        return self._given("lr_decay") or self.run_length

    @property
    def warmup_length(self) -> float:
        """Length of linear warm-up; a fraction of the decay need not be a whole number."""
        fraction = self.config.lr_warmup_fraction
        return self._given("lr_warmup") if fraction is None else fraction * self.decay_length

    def __call__(self, position: int) -> float:
        """The rate of the update that brings the run to `position`.

        Args:
            position: the iteration's number, from 1, or the samples consumed with its own.
        """
        peak, least = self.config.lr, self.config.min_lr
        if position <= self.warmup_length:
            start = self.config.lr_warmup_init
            return start + (peak - start) * position / self.warmup_length
        if self.config.lr_decay_style == "constant":
            return peak
        if position > self.decay_length:
            return least
        if self.config.lr_decay_style == "inverse-square-root":
            return max(least, peak * math.sqrt(max(self.warmup_length, 1.0) / position))
        return least + self._decay(position) * (peak - least)

    def _decay(self, position: int) -> float:
        if self.config.lr_decay_style != "WSD":
            progress = (position - self.warmup_length) / (self.decay_length - self.warmup_length)
            return DECAYS[self.config.lr_decay_style](progress)
        length = self._given("lr_wsd_decay")
        since = position - (self.decay_length - length)
        return 1.0 if since <= 0 else DECAYS[self.config.lr_wsd_decay_style](since / length)

    def _given(self, name: str) -> int:
        """The config's field of that name in the run's unit; 0 where it is not given."""
        return getattr(self.config, f"{name}_{self.unit}") or 0
