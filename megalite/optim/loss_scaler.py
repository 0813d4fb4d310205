"""The factor that keeps fp16 gradients within fp16's range (Micikevicius et al. 2018)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalite.config import OptimizerConfig
from megalite.config.optimizer import MAX_LOSS_SCALE

GROWTH = 2.0
BACKOFF = 0.5


class LossScaler:
    """A constant factor on the loss; 1 changes nothing.

    It lives on the host, which nobody waits for.
    """

    def __init__(self, scale: float) -> None:
        self._scale = torch.tensor(scale, dtype=torch.float32)

    @property
    def scale(self) -> float:
        """What the loss of the next backward pass is multiplied by."""
        return min(
            self._scale.item(), MAX_LOSS_SCALE
        )  # a checkpoint of an older version may have a larger one

    @property
    def can_go_down(self) -> bool:
        """Whether an infinite gradient may be the scale's doing, and a lower one will mend it."""
        return False

    def update(self, overflowed: bool) -> None:
        """Takes note of an iteration's outcome: whether its gradient was infinite or NaN."""

    def state(self) -> dict[str, Tensor]:
        """What a resumed run needs, as views: nothing of a constant."""
        return {}


class DynamicLossScaler(LossScaler):
    """Halves the scale on overflows and doubles it after a long time without one; Megatron's rule.

    `hysteresis` overflows bring it down, and each further one again, until the scale has next grown: that
    alone forgives the overflows before. Unlike Megatron's, the scale stops at `MAX_LOSS_SCALE`; torch's
    `GradScaler` stops at the largest finite number.
    """

    def __init__(self, config: OptimizerConfig) -> None:
        super().__init__(config.initial_loss_scale)
        self.config = config
        self._num_good = torch.zeros((), dtype=torch.int64)
        self._patience = torch.tensor(config.hysteresis, dtype=torch.int64)

    @property
    def can_go_down(self) -> bool:
        return self.scale > self.config.min_loss_scale

    def update(self, overflowed: bool) -> None:
        self._scale.clamp_(max=MAX_LOSS_SCALE)
        if overflowed:
            self._num_good.zero_()
            self._patience -= 1
            if self._patience.item() <= 0:
                self._scale.mul_(BACKOFF).clamp_(min=self.config.min_loss_scale)
            return
        self._num_good += 1
        if self._num_good.item() == self.config.loss_scale_window:
            self._num_good.zero_()
            self._patience.fill_(self.config.hysteresis)
            self._scale.mul_(GROWTH).clamp_(max=MAX_LOSS_SCALE)

    def state(self) -> dict[str, Tensor]:
        return {"scale": self._scale, "num_good": self._num_good, "patience": self._patience}


def build_loss_scaler(config: OptimizerConfig, dtype: torch.dtype) -> LossScaler:
    """The scaler that weights of `dtype` need: fp16's range is small, that of the others is fp32's."""
    if dtype != torch.float16:
        return LossScaler(1.0)
    return DynamicLossScaler(config) if config.loss_scale is None else LossScaler(config.loss_scale)


def scale_gradient(loss: Tensor, scale: float) -> Tensor:
    """The loss as it is, whose backward pass starts from `scale` instead of 1."""
    return loss if scale == 1.0 else _ScaleGradient.apply(loss, scale)


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale, None
