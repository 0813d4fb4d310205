"""How many of a batch's tokens count, where a mask leaves some out of the loss."""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.data.batch import Microbatch
from megalite.parallel.collectives import all_reduce
from megalite.topology import Topology


class CountedTokens:
    """The tokens of one or several global batches, and those of them that have a loss.

    A microbatch's loss is divided by the tokens of the whole batch before anyone can know how many of them
    count; `scale` makes up for it once, so that loss and gradients are means over the tokens that count,
    whatever the microbatches and the data-parallel ranks that they came in.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._masks: dict[tuple[int, int], tuple[int, Tensor]] = {}

    def noted(self, consumed: int, index: int, microbatch: Microbatch) -> Microbatch:
        """Gives microbatch `index` of the batch from sample `consumed` on, and counts it, if but once."""
        if microbatch.loss_mask is not None:
            mask = microbatch.loss_mask
            self._masks[consumed, index] = mask.numel(), mask.sum()
        return microbatch

    def scale(self) -> Tensor:
        """All tokens divided by those that count, an fp64 scalar on the device, the same on every rank.

        Every rank must call it. The ranks of the first stage count, which in any schedule see every sample;
        a batch in which no token counts has a loss of zero, and is divided by one.
        """
        topology = self._topology
        totals = torch.zeros(2, dtype=torch.float64, device=topology.device)
        if topology.pp.is_first and self._masks:
            sizes, counts = zip(*self._masks.values(), strict=True)
            totals[0] = sum(sizes)
            totals[1] = torch.stack(counts).sum()
        for axis in (topology.dp, topology.pp):
            all_reduce(totals, axis)
        return totals[0] / totals[1].clamp_min(1.0)
