"""Models of a program's own, for records and plans."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import megalite


class OwnLayer(nn.Module):
    """Computes x + w(x)."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden_size, width), nn.Linear(width, hidden_size)

    def forward(self, x: Tensor, microbatch: megalite.Microbatch) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class MixedModel(megalite.SequentialStage):
    """Has layers of two sizes, and a last one that differs by its `kind`."""

    def build_layer(self, number: int) -> nn.Module:
        layer = OwnLayer(self.config.hidden_size, 32 * (1 + number % 2))
        layer.spec = {"number": number}  # an attribute of its own, which cannot be hashed
        if number == self.config.num_layers - 1:
            layer.kind = "last"
        return layer


class ReadingLayer(OwnLayer):
    """Reads a value on the host."""

    def forward(self, x: Tensor, microbatch: megalite.Microbatch) -> Tensor:
        scale = 2.0 if x.abs().max() > 1 else 1.0
        return super().forward(x, microbatch) * scale


class ReadingModel(megalite.SequentialStage):
    """Has layers that read a value."""

    def build_layer(self, number: int) -> nn.Module:
        return ReadingLayer(self.config.hidden_size, 32)


class SelectingLayer(OwnLayer):
    """Selects tokens by their values."""

    def forward(self, x: Tensor, microbatch: megalite.Microbatch) -> Tensor:
        chosen = (x > 0).nonzero()
        return x + chosen.sum()


class SelectingModel(megalite.SequentialStage):
    """Has layers whose sizes depend on values."""

    def build_layer(self, number: int) -> nn.Module:
        return SelectingLayer(self.config.hidden_size, 32)
