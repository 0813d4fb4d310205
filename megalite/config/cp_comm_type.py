"""Communication types of context parallelism: how queries reach the keys of other ranks (--cp-comm-type)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

CpCommType = Literal["all_gather", "a2a", "p2p", "a2a+p2p"]
CpCommTypes = CpCommType | tuple[CpCommType, ...]
"""One communication type for all layers, or one for each layer."""


class CpCommProperties(NamedTuple):
    """Value of --cp-comm-type.

    Attributes:
        gathers_keys: a rank computes attention of its own queries with all keys, which it gathers.
        exchanges_heads: ranks exchange tokens for heads before attention, and back after it.
        passes_keys: attention receives keys and values from one rank of a ring after another.
    """

    gathers_keys: bool = False
    exchanges_heads: bool = False
    passes_keys: bool = False

    @property
    def has_levels(self) -> bool:
        """Return whether neighbouring ranks exchange heads, and groups of them form a ring."""
        return self.exchanges_heads and self.passes_keys

    @property
    def is_zigzag(self) -> bool:
        """Return whether ranks hold positions in zigzag order, because each attends with its own queries."""
        return self.gathers_keys or self.passes_keys


CP_COMM_PROPERTIES: Mapping[str, CpCommProperties] = {
    "all_gather": CpCommProperties(gathers_keys=True),
    "a2a": CpCommProperties(exchanges_heads=True),
    "p2p": CpCommProperties(passes_keys=True),
    "a2a+p2p": CpCommProperties(exchanges_heads=True, passes_keys=True),
}


def comm_type_of_layer(comm_types: CpCommTypes, layer: int) -> CpCommType:
    """Return the communication type of a layer; modules of multi-token prediction have the last layer's.

    Args:
        layer: number of the layer in the whole model.
    """
    return comm_types if isinstance(comm_types, str) else comm_types[min(layer, len(comm_types) - 1)]
