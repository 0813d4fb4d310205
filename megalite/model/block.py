"""The result of a block of a transformer layer, such as attention or the MLP."""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor, nn

from megalite.loss_terms import SharedKeys, Terms


class BlockOutput(NamedTuple):
    """Holds what a layer adds to its input: ``x + bias``, which the kernel of the residual connection adds.

    Attributes:
        x: ``[s, b, h]``.
        bias: ``[h]``; None if the block has no bias.
        terms: terms of the loss that the block computes.
        keys: keys and values that later layers attend to.
    """

    x: Tensor
    bias: nn.Parameter | None
    terms: Terms = MappingProxyType({})
    keys: SharedKeys = MappingProxyType({})
