"""The word table that the first and the last pipeline stage share."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from megalite.topology import Axis


def sum_tied_gradient(weight: nn.Parameter | None, pp: Axis) -> None:
    """Adds the gradients of the two copies of a tied weight, in place on both.

    The two stages swap their gradients and each adds the other's: a sum of two is the same bits on both
    sides, so the copies stay equal for ever. No group of their own is needed.

    Args:
        weight: this rank's copy; None on a stage that has none.
    """
    if weight is None or pp.size == 1:
        return
    assert weight.grad is not None
    other_rank = pp.ranks[0] if pp.is_last else pp.ranks[-1]
    other = torch.empty_like(weight.grad)
    messages = [
        dist.P2POp(dist.isend, weight.grad, other_rank, pp.group),
        dist.P2POp(dist.irecv, other, other_rank, pp.group),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    weight.grad += other
