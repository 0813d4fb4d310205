"""Compute norms over the elements of all ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.distributed.collectives import all_reduce
from megalite.distributed.topology import Topology
from megalite.utils.torch_private import foreach_norm

BLOCKS = {"cpu": 2**16}
"""Number of squares to sum in one call, by device; on other devices all, because the op splits them.

torch's CPU norm adds squares in a few long fp32 chains: the result for 1e8 elements is 1% too small, and the
error depends on the layout. Blocks of this size are exact to 2e-7."""


class CountedShard(NamedTuple):
    """Elements of a parameter that this rank counts in norms, and no other rank of the world.

    Attributes:
        main: main weights, ``[n]``.
        gradient: complete gradient, ``[n]``.
        moments: AdamW's moments, or a matrix's momentum, by torch's names, ``[n]``.
        num_used: number of elements before the vocabulary's padding.
    """

    name: str
    main: Tensor
    gradient: Tensor
    moments: Mapping[str, Tensor]
    num_used: int


def global_norm(gradients: Iterable[Tensor], topology: Topology) -> Tensor:
    """Return the 2-norm of the whole model's gradient, the same number on every rank.

    Args:
        gradients: the parts of the gradient that only this rank counts.

    Returns:
        An fp64 scalar: squares of fp32 norms overflow fp32 long before the gradient does.
    """
    return all_reduce(sum_of_squares(gradients, topology.device), topology.world).sqrt()


def sum_of_squares(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares of all elements, an fp64 scalar."""
    blocks = [
        block
        for gradient in gradients
        for block in gradient.view(-1).split(BLOCKS.get(gradient.device.type, sys.maxsize))
    ]
    if not blocks:
        return torch.zeros((), dtype=torch.float64, device=device)
    here: list[Tensor] = []
    offloaded: list[Tensor] = []  # main weights may be offloaded
    for norm in foreach_norm(blocks):
        (here if norm.device.type == device.type else offloaded).append(norm)
    norms = torch.cat([torch.stack(part).to(device) for part in (here, offloaded) if part])
    return norms.double().square().sum()
