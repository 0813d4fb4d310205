"""Count where a router sends the tokens of an iteration.

Shapes: e experts.
"""

from __future__ import annotations

import torch
from torch import Tensor


class RoutingStatistics:
    """Adds up what a router does with this rank's tokens, from microbatch to microbatch.

    Attributes:
        num_tokens: number of tokens that selected each expert, ``[e]``, int64.
        num_dropped: number of these choices that were dropped because the expert was at capacity.
        entropy: sum over the tokens of the entropy of their probabilities, in nats, a fp64 scalar.
    """

    def __init__(self, num_experts: int, device: torch.device) -> None:
        self.num_tokens = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self.num_dropped = torch.zeros((), dtype=torch.int64, device=device)
        self.entropy = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, counts: Tensor, shares: Tensor, is_real: Tensor | None) -> None:
        """Add a microbatch.

        Args:
            counts: number of tokens of each expert, ``[e]``, without padding.
            shares: the tokens' probabilities of experts, ``[s, b, e]``.
            is_real: bool ``[s, b]``, False for padding; None without padding.
        """
        self.num_tokens += counts
        entropies = torch.special.entr(shares)
        entropies = entropies if is_real is None else entropies.where(is_real.unsqueeze(-1), 0.0)
        self.entropy += entropies.sum(dtype=torch.float64)
