"""From complete gradients to new weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalite.observer import Observer, observed
from megalite.optim.adamw import AdamW
from megalite.optim.loss_scaler import LossScaler


class ClippedUpdate:
    """AdamW's update with gradients that are unscaled and clipped to a norm first.

    All that it depends on stays on the device, which decides whether there is an update at all: nothing is
    read, and nobody waits.

    Args:
        scaler: that scaled the loss.
        clip_grad: the largest norm that is not clipped; 0 clips none.
        observers: told of clipping and of the update.
    """

    def __init__(
        self,
        adamw: AdamW,
        scaler: LossScaler,
        clip_grad: float,
        observers: Sequence[Observer[str]] = (),
    ) -> None:
        self.adamw = adamw
        self.scaler = scaler
        self.clip_grad = clip_grad
        self.observers = observers

    @torch.no_grad()
    def __call__(
        self,
        gradients: Sequence[Tensor],
        learning_rate: float,
        weight_decay: float,
        grad_norm: Tensor,
        is_allowed: Tensor | None = None,
    ) -> None:
        """Updates the weights and scales the gradients in place, or leaves both as they are.

        They are left where the norm is not finite or the update is not allowed.

        Args:
            gradients: of the elements that this rank updates, as AdamW takes them.
            grad_norm: of the whole model's unscaled gradient, an fp64 scalar on the device.
            is_allowed: a bool scalar on the device; by default it is.
        """
        with observed(self.observers, "optimizer-clip-main-grad"):
            is_good = grad_norm.isfinite()
            if is_allowed is not None:
                is_good = is_good.logical_and_(is_allowed)
            divisor = self._divisor(grad_norm)
            if divisor is not None and gradients and gradients[0].dtype == torch.float64:
                factor = torch.where(is_good, divisor.reciprocal(), 1.0)
                torch._foreach_mul_(list(gradients), factor)
                divisor = None  # AdamW would take it in fp32
        with observed(self.observers, "optimizer-inner-step"):
            self.adamw.step(gradients, learning_rate, weight_decay, divisor, is_good)

    def _divisor(self, grad_norm: Tensor) -> Tensor | None:
        """What unscales and clips, an fp64 scalar; None where nothing ever does."""
        scale = self.scaler.scale  # of these gradients
        if self.clip_grad > 0.0:
            excess = (grad_norm + 1e-6) / self.clip_grad  # torch's and Megatron's formula
            return excess.clamp_min_(1.0).mul_(scale)
        return None if scale == 1.0 else torch.full_like(grad_norm, scale)
