"""From complete gradients to new weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megalite.observer import Observer, observed
from megalite.optim.adamw import AdamW
from megalite.optim.loss_scaler import LossScaler


class ClippedUpdate:
    """AdamW's update with gradients that are unscaled and clipped to a norm first.

    Args:
        scaler: that scaled the loss; told of each norm.
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

    def __call__(
        self, gradients: Sequence[Tensor], learning_rate: float, weight_decay: float, grad_norm: float
    ) -> bool:
        """Updates the weights, and scales the gradients in place.

        Args:
            gradients: of the elements that this rank updates, as AdamW takes them.
            grad_norm: of the whole model's unscaled gradient.

        Returns:
            False where the norm is not finite: the weights are left as they were.
        """
        scale = self.scaler.scale  # of these gradients
        self.scaler.update(overflowed=not math.isfinite(grad_norm))
        if not math.isfinite(grad_norm):
            return False
        factor = 1.0 / scale
        if self.clip_grad > 0.0:
            factor *= min(1.0, self.clip_grad / (grad_norm + 1e-6))  # torch's and Megatron's formula
        if factor != 1.0 and gradients:
            with observed(self.observers, "optimizer-clip-main-grad"):
                torch._foreach_mul_(list(gradients), factor)
        with observed(self.observers, "optimizer-inner-step"):
            self.adamw.step(gradients, learning_rate, weight_decay)
        return True
