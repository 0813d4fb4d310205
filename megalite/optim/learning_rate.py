"""The learning rate's course over the iterations, with Megatron's formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

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
    """Warm-up, then decay; a pure function of the iteration, so a resumed run needs no state.

    Iteration i is updated with the rate that Megatron logs for it. Megatron itself updates with the one
    before, so that its first update, at the start of warm-up, has rate 0.

    Args:
        train_iters: iterations of the run, the decay's length where the config names none.
    """

    config: OptimizerConfig
    train_iters: int

    @property
    def decay_iters(self) -> int:
        """Iteration at which the decay ends."""
        return self.config.lr_decay_iters or self.train_iters

    @property
    def warmup_iters(self) -> float:
        """Iterations of linear warm-up; a fraction of the decay need not be a whole number."""
        fraction = self.config.lr_warmup_fraction
        return self.config.lr_warmup_iters if fraction is None else fraction * self.decay_iters

    def __call__(self, iteration: int) -> float:
        """The rate of iteration `iteration`, counted from 1."""
        peak, least = self.config.lr, self.config.min_lr
        if iteration <= self.warmup_iters:
            return (
                self.config.lr_warmup_init
                + (peak - self.config.lr_warmup_init) * iteration / self.warmup_iters
            )
        if self.config.lr_decay_style == "constant":
            return peak
        if iteration > self.decay_iters:
            return least
        if self.config.lr_decay_style == "inverse-square-root":
            return max(least, peak * math.sqrt(max(self.warmup_iters, 1.0) / iteration))
        return least + self._decay(iteration) * (peak - least)

    def _decay(self, iteration: int) -> float:
        if self.config.lr_decay_style != "WSD":
            progress = (iteration - self.warmup_iters) / (self.decay_iters - self.warmup_iters)
            return DECAYS[self.config.lr_decay_style](progress)
        length = self.config.lr_wsd_decay_iters or 0
        since = iteration - (self.decay_iters - length)
        return 1.0 if since <= 0 else DECAYS[self.config.lr_wsd_decay_style](since / length)
