"""Limit the tokens of an expert in each sample, so that the limit does not depend on the layout.

Shapes: S positions of a sample, b microbatch, k experts of a token, e experts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def capacity_of(num_positions: int, topk: int, num_experts: int, factor: float) -> int:
    """Return the largest number of tokens of an expert in a sample: `factor` times the mean, rounded up."""
    return math.ceil(num_positions * topk * factor / num_experts)


def within_capacity(experts: Tensor, priorities: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Return which choices are within their expert's capacity, bool ``[S, b, k]``.

    An expert takes the choices with the highest priorities. Of equal ones, earlier positions come first.

    Args:
        experts: ``[S, b, k]``, different for each token.
        priorities: ``[S, b, k]``.
    """
    length, num_samples, topk = experts.shape
    # [b, S k], first ordered by priority, then by expert.
    of_samples, values = (each.transpose(0, 1).flatten(1) for each in (experts, priorities))
    order = values.sort(dim=1, descending=True, stable=True).indices
    by_expert = of_samples.gather(1, order).sort(dim=1, stable=True)
    order = order.gather(1, by_expert.indices)
    numbers = torch.arange(num_experts, device=experts.device).expand(num_samples, -1).contiguous()
    starts = torch.searchsorted(by_expert.values.contiguous(), numbers)  # of each expert's choices, [b, e]
    places = torch.arange(length * topk, device=experts.device) - starts.gather(1, by_expert.values)
    is_kept = torch.empty_like(places, dtype=torch.bool).scatter_(1, order, places < capacity)
    return is_kept.unflatten(1, (length, topk)).transpose(0, 1)
