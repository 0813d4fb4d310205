"""The gradient's global norm."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
from torch import Tensor

from megalite.parallel.collectives import all_reduce
from megalite.topology import Topology

BLOCKS = {"cpu": 2**16}
"""Elements summed in one go, by device; elsewhere all at once, which the op itself cuts into such blocks.

torch's CPU norm adds squares in a few long fp32 chains: 1e8 elements at once come out 1% too small, and by
another share in another layout; blocks of this size are exact to 2e-7."""


def global_norm(gradients: Iterable[Tensor], topology: Topology) -> Tensor:
    """2-norm of the whole model's gradient, the same number on every rank.

    Args:
        gradients: parts of the gradient that no other rank of the world counts.

    Returns:
        A scalar in fp64: squares of fp32 norms overflow fp32 long before the gradient itself does.
    """
    return all_reduce(sum_of_squares(gradients, topology.device), topology.world).sqrt()


def sum_of_squares(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """Of all elements, a scalar in fp64."""
    size = BLOCKS.get(device.type, sys.maxsize)
    if blocks := [block for gradient in gradients for block in gradient.view(-1).split(size)]:
        return torch.stack(torch._foreach_norm(blocks)).double().square().sum()
    return torch.zeros((), dtype=torch.float64, device=device)
