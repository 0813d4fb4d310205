"""Limit the tokens of an expert in each sample, so that the limit does not depend on the layout.

Shapes: S positions of a sample, b microbatch, k experts of a token, e experts.
"""

from __future__ import annotations

import torch
from torch import Tensor


def capacity_of(num_choices: Tensor, num_experts: int, factor: float) -> Tensor:
    """Return the largest number of tokens of an expert in a sample: `factor` times the mean, rounded up.

    Args:
        num_choices: int64, choices of the sample's tokens.
    """
    return (num_choices.double() * factor / num_experts).ceil().long()


def within_capacity(experts: Tensor, priorities: Tensor, num_experts: int, factor: float) -> Tensor:
    """Return which choices are within their expert's capacity, bool ``[S, b, k]``.

    An expert takes the choices with the highest priorities. Of equal ones, earlier positions come first.

    Args:
        experts: ``[S, b, k]``, different for each token; e for those of padding, which has no part in it.
        priorities: ``[S, b, k]``.
        factor: see `capacity_of`.
    """
    length, num_samples, topk = experts.shape
    # [b, S k], first ordered by priority, then by expert.
    of_samples, values = (each.transpose(0, 1).flatten(1) for each in (experts, priorities))
    order = values.sort(dim=1, descending=True, stable=True).indices
    by_expert = of_samples.gather(1, order).sort(dim=1, stable=True)
    order = order.gather(1, by_expert.indices)
    numbers = torch.arange(num_experts + 1, device=experts.device).expand(num_samples, -1).contiguous()
    # Of each expert's choices, and of padding's, [b, e + 1].
    starts = torch.searchsorted(by_expert.values.contiguous(), numbers)
    capacity = capacity_of(starts[:, -1:], num_experts, factor)  # [b, 1]
    places = torch.arange(length * topk, device=experts.device) - starts.gather(1, by_expert.values)
    is_kept = torch.empty_like(places, dtype=torch.bool).scatter_(1, order, places < capacity)
    return is_kept.unflatten(1, (length, topk)).transpose(0, 1)
