"""Even out the use of experts by the counts of a global batch.

Shapes: e experts, L layers of this rank with experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from megalite.distributed.collectives import all_reduce
from megalite.distributed.topology import Topology
from megalite.tensor_parallel.parameter_spec import spec_of


class CountingRouter(Protocol):
    """Interface of a router that counts the tokens of its experts.

    Attributes:
        weight: the router's parameter; its gradient is summed over the ranks whose tokens are counted.
        expert_bias: ``[e]``, added to the scores that select experts, or None.
        expert_loads: ``[e]``, the parts of the last global batch's choices that the experts had, or None.
        num_tokens: ``[e]``, int64, how often each expert was selected on this rank, which forward counts.
    """

    weight: nn.Parameter
    expert_bias: Tensor | None
    expert_loads: Tensor | None
    num_tokens: Tensor


class ExpertBalance:
    """Update of the biases and loads of experts, after the optimizer's.

    The bias of an expert with fewer tokens of the global batch than the mean rises, and the bias of one with
    more falls (Wang et al. 2024, arXiv 2408.15664). The loads are what the next iteration's balance loss
    uses. The counts are whole numbers, so every layout makes the same changes.

    Args:
        routers: routers of this rank.
        rate: change of a bias in one update.
    """

    def __init__(self, topology: Topology, routers: Sequence[CountingRouter], rate: float) -> None:
        self.topology = topology
        self.routers = routers
        self.rate = rate

    def begin(self) -> None:
        """Forget the counts before an iteration."""
        for router in self.routers:
            router.num_tokens.zero_()

    @torch.no_grad()
    def step(self, is_good: Tensor) -> None:
        """Change biases and loads; all ranks that hold the same layers must call it."""
        counts = torch.stack([router.num_tokens for router in self.routers])  # [L, e]
        sum_over_tokens(counts, self.routers[0].weight, self.topology)
        totals = counts.sum(1, keepdim=True)
        signs = (counts * counts.shape[1] - totals).sign()
        has_counts = is_good & (totals > 0)  # [L, 1]; forced balance counts nothing
        for router, sign, count, total, has_count in zip(
            self.routers, signs, counts, totals, has_counts, strict=True
        ):
            if router.expert_bias is not None:
                change = torch.where(is_good, sign, 0).to(router.expert_bias.dtype)
                router.expert_bias -= change * self.rate
            if router.expert_loads is not None:
                loads = count.to(router.expert_loads.dtype) / total
                router.expert_loads.copy_(torch.where(has_count, loads, router.expert_loads))


def sum_over_tokens(totals: Tensor, weight: nn.Parameter, topology: Topology) -> None:
    """Sum in place over the ranks of a stage whose routers, with this weight, route different tokens."""
    axes = spec_of(weight).parameter_axes
    for axis in (axes.replicas(topology), axes.partial_axis(topology)):
        if axis is not None:
            all_reduce(totals, axis, of="tokens of each expert")
