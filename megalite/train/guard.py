"""Which iterations must not change the weights."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from megalite.config import TrainingConfig

MIN_LOSSES = 10
"""Losses of before that a spiky one is told from; with fewer, none is spiky: the first ones fall too fast."""


@dataclass(frozen=True)
class Fault:
    """Why an update is left out.

    Attributes:
        what: in words.
    """

    kind: Literal["loss", "gradient", "spike"]
    what: str


class Guard:
    """Judges an iteration by figures that are the same on every rank, so every rank judges alike."""

    def __init__(self, config: TrainingConfig) -> None:
        self._checks_nan = config.check_for_nan_in_loss_and_grad
        self._checks_spikes = config.check_for_spiky_loss
        self._factor = config.spiky_loss_factor

    def fault(
        self,
        loss: float,
        grad_norm: float,
        recent_losses: Sequence[float],
        may_overflow: bool = False,
    ) -> Fault | None:
        """What is wrong with an iteration; None where its update may be made.

        Args:
            loss: of the global batch.
            grad_norm: of the whole model's gradient.
            recent_losses: that iterations before were trained on, oldest first.
            may_overflow: gradients that are not finite may come of the loss scale, which will be lowered.

        A loss is spiky where it is above the factor times the median of the recent ones: unlike their
        maximum (Megatron-LM's measure), which stays at the first iterations' loss, it follows the loss down.
        """
        if self._checks_nan and not math.isfinite(loss):
            return Fault("loss", f"the loss is {loss}")
        if self._checks_nan and not math.isfinite(grad_norm) and not may_overflow:
            return Fault("gradient", f"the grad norm is {grad_norm}")
        median = self._median(recent_losses)
        if median is None or not loss > self._factor * median:
            return None
        return Fault(
            "spike",
            f"the loss {loss:.6g} is above {self._factor:g} times {median:.6g}, the median of the last "
            f"{len(recent_losses)}",
        )

    def allows(self, loss: Tensor, recent_losses: Sequence[float]) -> Tensor:
        """Whether `fault` would find nothing wrong with the loss, a bool scalar where the loss is.

        So the device can leave an update out before the host has read what it is judged by.
        """
        median = self._median(recent_losses)
        highest = math.inf if median is None else self._factor * median
        is_low = loss.gt(highest).logical_not_()  # NaN is not above anything
        return is_low.logical_and_(loss.isfinite()) if self._checks_nan else is_low

    def kept(self, loss: float) -> tuple[float, ...]:
        """What later losses are told by, of an iteration that was trained: its loss, or nothing."""
        return (loss,) if self._checks_spikes and math.isfinite(loss) else ()

    def _median(self, recent_losses: Sequence[float]) -> float | None:
        """What a loss is spiky above a multiple of; None where none is."""
        if not self._checks_spikes or len(recent_losses) < MIN_LOSSES:
            return None
        return statistics.median(recent_losses)
