"""The result of a block of a transformer layer, such as attention or the MLP."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn


class BlockOutput(NamedTuple):
    """Holds what a layer adds to its input: ``x + bias``, which the kernel of the residual connection adds.

    Attributes:
        x: ``[s, b, h]``.
        bias: ``[h]``; None if the block has no bias.
    """

    x: Tensor
    bias: nn.Parameter | None
