"""Even out the use of experts by a bias of their scores (Wang et al. 2024, arXiv 2408.15664).

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


class BiasedRouter(Protocol):
    """Declares the interface of a router with a bias.

    Attributes:
        weight: the router's parameter; its gradient is summed over the ranks whose tokens are counted.
        expert_bias: ``[e]``.
        num_tokens: ``[e]``, int64, how often each expert was selected on this rank, which forward counts.
    """

    weight: nn.Parameter
    expert_bias: Tensor | None
    num_tokens: Tensor


class ExpertBias:
    """Raises the bias of experts with fewer tokens of a global batch than the mean, and lowers the others'.

    The counts are whole numbers, so every layout makes the same change.

    Args:
        routers: routers of this rank.
        rate: change of a bias in one update.
    """

    def __init__(self, topology: Topology, routers: Sequence[BiasedRouter], rate: float) -> None:
        self.topology = topology
        self.routers = routers
        self.rate = rate

    def begin(self) -> None:
        """Forget the counts before an iteration."""
        for router in self.routers:
            router.num_tokens.zero_()

    @torch.no_grad()
    def step(self, is_good: Tensor) -> None:
        """Change the biases; all ranks that hold the same layers must call it."""
        if not self.routers:
            return
        counts = torch.stack([router.num_tokens for router in self.routers])  # [L, e]
        sum_over_tokens(counts, self.routers[0].weight, self.topology)
        above = counts * counts.shape[1] - counts.sum(1, keepdim=True)
        for router, sign in zip(self.routers, above.sign(), strict=True):
            assert router.expert_bias is not None
            change = torch.where(is_good, sign, 0).to(router.expert_bias.dtype)
            router.expert_bias -= change * self.rate


def sum_over_tokens(totals: Tensor, weight: nn.Parameter, topology: Topology) -> None:
    """Sum in place over the ranks of a stage whose routers, with this weight, route different tokens."""
    axes = spec_of(weight).parameter_axes
    for axis in (axes.replicas(topology), axes.partial_axis(topology)):
        if axis is not None:
            all_reduce(totals, axis, of="tokens of each expert")
