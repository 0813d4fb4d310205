"""The word embedding that the first and last pipeline stage share, and the sum of its gradients.

The last stage uses it as the output layer's weight, for the later tokens of multi-token prediction, or both.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.distributed.axis import Axis

EMBEDDING_GRADS = "embedding-grads-all-reduce"
"""Name of the wait in `sum_tied_embedding_grads`, as in Megatron-LM's timers."""


class TiedWeight(NamedTuple):
    """Word embedding that two stages use.

    Attributes:
        weight: this rank's slice.
        has_other_copy: whether the first and last stage are on different ranks, each with a copy, or on one
            rank, where they share the parameter.
        num_gradients: number of gradients of a microbatch on this rank.
    """

    weight: nn.Parameter
    has_other_copy: bool
    num_gradients: int = 1


def sum_tied_embedding_grads(gradient: Tensor, pp: Axis) -> None:
    """Sum the gradients of a tied weight's two copies on the first and last rank of pp, in place.

    The two ranks exchange their gradients, and each adds the other's. A sum of two numbers has the same bits
    in either order, so the copies stay equal. This needs no process group of the two ranks.
    """
    assert pp.size > 1 and (pp.is_first or pp.is_last)
    other_rank = pp.ranks[0] if pp.is_last else pp.ranks[-1]
    other = torch.empty_like(gradient)
    messages = [
        dist.P2POp(dist.isend, gradient, other_rank, pp.group),
        dist.P2POp(dist.irecv, other, other_rank, pp.group),
    ]
    works = dist.batch_isend_irecv(messages)
    pp.wait_begins(EMBEDDING_GRADS)
    for work in works:
        work.wait()
    pp.wait_ends(EMBEDDING_GRADS)
    gradient += other
