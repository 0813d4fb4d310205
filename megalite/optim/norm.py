"""The gradient's global norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalite.parallel.collectives import all_reduce
from megalite.topology import Topology

BLOCK = 2**16
"""Elements summed in one go. torch's CPU norm adds squares in a few long fp32 chains: 1e8 elements at once
come out 1% too small, and by another share in another layout; blocks of this size are exact to 2e-7."""


def global_norm(gradients: Sequence[Tensor], topology: Topology) -> Tensor:
    """2-norm of the whole model's gradient, the same number on every rank.

    Args:
        gradients: this rank's gradients, of parameters that no other rank of its replica counts.

    Returns:
        A scalar in fp64: squares of fp32 norms overflow fp32 long before the gradient itself does.
    """
    squares = torch.zeros((), dtype=torch.float64, device=topology.device)
    if gradients:
        norms = torch._foreach_norm([block for grad in gradients for block in grad.view(-1).split(BLOCK)])
        squares = torch.stack(norms).double().square().sum()
    for axis in (topology.tp, topology.pp):
        all_reduce(squares, axis)
    return squares.sqrt()
