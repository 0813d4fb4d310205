"""The weight decay's course over the run, with Megatron's formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megalite.config import OptimizerConfig


@dataclass(frozen=True)
class WeightDecay:
    """Rises from its start to its end; a pure function of the position in the run.

    Args:
        length: that it takes to rise, in the unit that the run is counted in: iterations or samples.
    """

    config: OptimizerConfig
    length: int

    def __call__(self, position: int) -> float:
        """The decay of the update that brings the run to `position`."""
        if self.config.weight_decay_incr_style == "constant":
            return self.config.weight_decay
        start, end = self.config.start_weight_decay, self.config.end_weight_decay
        assert start is not None and end is not None
        share = min(position / self.length, 1.0)
        if self.config.weight_decay_incr_style == "cosine":
            share = 0.5 * (math.cos(math.pi * (1.0 - share)) + 1.0)
        return start + share * (end - start)
