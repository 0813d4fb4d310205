"""The word table that the first and the last pipeline stage share."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.topology import Axis

EDGES = "embedding-grads-all-reduce"
"""What the wait of `sum_over_edges` is called, as Megatron-LM calls its timer."""


class TiedWeight(NamedTuple):
    """A word table that the pipeline's first and last stage use.

    Attributes:
        weight: this rank's; with one rank for both stages, they share it.
        is_copied: whether the two stages are on two ranks, the first and the last of pp, each with a copy.
    """

    weight: nn.Parameter
    is_copied: bool


def sum_over_edges(gradient: Tensor, pp: Axis) -> None:
    """Adds the gradients of a tied weight's two copies, on the first and the last rank of pp, in place.

    The two ranks swap their gradients and each adds the other's: a sum of two is the same bits on both
    sides, so the copies stay equal for ever. No group of their own is needed.
    """
    assert pp.size > 1 and (pp.is_first or pp.is_last)
    other_rank = pp.ranks[0] if pp.is_last else pp.ranks[-1]
    other = torch.empty_like(gradient)
    messages = [
        dist.P2POp(dist.isend, gradient, other_rank, pp.group),
        dist.P2POp(dist.irecv, other, other_rank, pp.group),
    ]
    works = dist.batch_isend_irecv(messages)
    pp.wait_begins(EDGES)
    for work in works:
        work.wait()
    pp.wait_ends(EDGES)
    gradient += other
