"""Update the exponential moving average (EMA) of weights, on the device or on the host."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_SWAPPED = 1 << 22
"""Number of elements that `swap_` copies at a time."""


def ema_share(number: Tensor, decay: float) -> Tensor:
    """Return the share of the new weights in the average after an update, an fp64 scalar.

    It is (1 - d) / (1 - d^n) after update n: the average is the mean of the weights after all updates, and
    weights that are k updates old count d^k. Initial weights do not count.

    Args:
        number: number of the update, from 1; 0 is taken as 1.
        decay: d.
    """
    return (decay - 1.0) / torch.expm1(number.double().clamp_min(1.0) * math.log(decay))


def update_ema_(ema: Tensor, weight: Tensor, share: Tensor) -> None:
    """Replace a share of the average by the new weights, in place; a share of 0 keeps every bit.

    Args:
        ema: ``[n]``; weight: ``[n]`` in the same dtype.
        share: a scalar.
    """
    ema.lerp_(weight, share.to(ema.dtype))


def swap_(one: Tensor, other: Tensor) -> None:
    """Exchange the values of two tensors ``[n]``, which may be on two devices, with little more memory."""
    for here, there in zip(one.split(_SWAPPED), other.split(_SWAPPED), strict=True):
        kept = there.to(here.device, copy=True)
        there.copy_(here)
        here.copy_(kept)
