"""Decide which iterations must not change the weights: NaN, infinite gradients, loss spikes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from megalite.config import TrainingConfig

MIN_LOSSES = 10
"""Number of earlier losses that the check needs: the first losses of a run fall too fast."""


@dataclass(frozen=True)
class Anomaly:
    """Reason for skipping an update.

    Attributes:
        what: a clause for the log, such as "the loss is nan".
    """

    kind: Literal["loss", "gradient", "spike"]
    what: str


class AnomalyCheck:
    """Check of an iteration by numbers that are the same on every rank, so every rank decides the same.

    A loss is a spike if it is above `spiky_loss_factor` times the median of the recent losses. Unlike their
    maximum (Megatron-LM's measure), which stays at the loss of the first iterations, the median follows the
    loss down.
    """

    def __init__(self, config: TrainingConfig) -> None:
        self._checks_nan = config.check_for_nan_in_loss_and_grad
        self._checks_spikes = config.check_for_spiky_loss
        self._factor = config.spiky_loss_factor

    def find(
        self,
        loss: float,
        grad_norm: float,
        recent_losses: Sequence[float],
        may_overflow: bool = False,
    ) -> Anomaly | None:
        """Return what is wrong with an iteration, or None if its update is allowed.

        Args:
            loss: loss of the global batch.
            grad_norm: norm of the whole model's gradient.
            recent_losses: losses of earlier iterations that updated the weights, oldest first.
            may_overflow: an infinite gradient may come from the loss scale, which will be lowered.
        """
        if self._checks_nan and not math.isfinite(loss):
            return Anomaly("loss", f"the loss is {loss}")
        if self._checks_nan and not math.isfinite(grad_norm) and not may_overflow:
            return Anomaly("gradient", f"the grad norm is {grad_norm}")
        median = self._median(recent_losses)
        if median is None or not loss > self._factor * median:
            return None
        return Anomaly(
            "spike",
            f"the loss {loss:.6g} is above {self._factor:g} times {median:.6g}, the median of the last "
            f"{len(recent_losses)}",
        )

    def allows(self, loss: Tensor, recent_losses: Sequence[float]) -> Tensor:
        """Return whether `find` would accept the loss, as a bool scalar on the loss' device.

        The device uses it to skip an update before the host has read the loss.
        """
        median = self._median(recent_losses)
        highest = math.inf if median is None else self._factor * median
        is_low = loss.gt(highest).logical_not_()  # a comparison with NaN is False
        return is_low.logical_and_(loss.isfinite()) if self._checks_nan else is_low

    def losses_to_keep(self, loss: float) -> tuple[float, ...]:
        """Return the loss of an iteration that updated the weights, if later losses are compared with it."""
        return (loss,) if self._checks_spikes and math.isfinite(loss) else ()

    def _median(self, recent_losses: Sequence[float]) -> float | None:
        if not self._checks_spikes or len(recent_losses) < MIN_LOSSES:
            return None
        return statistics.median(recent_losses)
