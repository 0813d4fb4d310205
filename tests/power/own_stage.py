"""A model of a user's own, with buffers that are state: sums of what its layers have seen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megalite import ColumnParallelLinear, Cut, RowParallelLinear, SequentialStage, new_buffer
from megalite.distributed.collectives import all_reduce


class Counting(nn.Module):
    """Sums the squares of its hidden channels over all tokens, and scales the channels by a constant."""

    def __init__(self, stage: SequentialStage) -> None:
        super().__init__()
        h, ffn, context = stage.config.hidden_size, stage.config.ffn_size, stage.context
        self.loss_ranks = context.topology.loss_ranks
        self.up = ColumnParallelLinear(h, ffn, context, std=0.1)
        self.down = RowParallelLinear(ffn, h, context, std=0.1)
        scale = torch.linspace(1.0, 2.0, ffn, dtype=torch.float64)
        self.register_buffer("scale", new_buffer(scale, context, Cut("tp", 0)))
        self.register_buffer("seen", new_buffer(torch.zeros_like(scale), context, Cut("tp", 0)))

    def forward(self, x: Tensor, microbatch: Any) -> Tensor:
        y = self.up(x)  # [s, b, ffn/tp]
        if not is_recomputed():
            self.seen += all_reduce(y.detach().square().sum((0, 1)), self.loss_ranks)
        return x + self.down(torch.tanh(y * self.scale))


def is_recomputed() -> bool:
    """Return whether backward runs this forward a second time."""
    return torch._C._current_graph_task_id() != -1


class CountingStage(SequentialStage):
    """A pipeline stage of layers that count."""

    def build_layer(self, number: int) -> nn.Module:
        return Counting(self)
