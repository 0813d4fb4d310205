"""The kinds of layers, and patterns that select layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LayerKind:
    """Describes in what a layer differs from other layers of its model.

    Attributes:
        window: largest number of keys before its own that a query attends to; None without this limit.
        rotary: whether queries and keys are rotated by their position, in a model with rope.
        own_rotary: whether they are rotated with the base and scaling of layers with a window, which differ
            from those of other layers.
        has_experts: whether the MLP is a mixture of experts.
        mixer: what lets a token see earlier ones: attention, a recurrent mixer (`MIXERS`), or none.
        has_mlp: whether the layer has an MLP, or experts in its place.
    """

    window: int | None = None
    rotary: bool = True
    own_rotary: bool = False
    has_experts: bool = False
    mixer: Literal["attention", "gated_delta_net", "mamba", "none"] = "attention"
    has_mlp: bool = True


HYBRID_KINDS: Mapping[str, LayerKind] = {
    "M": LayerKind(mixer="mamba", has_mlp=False),
    "*": LayerKind(has_mlp=False),
    "-": LayerKind(mixer="none"),
    "E": LayerKind(mixer="none", has_experts=True),
}
"""Kinds of layers with one block, by their letters in --hybrid-override-pattern."""


def is_marked(pattern: tuple[int, ...], number: int, every_nth: int) -> bool:
    """Return whether a pattern of layers marks a layer with 1.

    Args:
        pattern: a number for each layer, or a single number N.
        every_nth: mark of every Nth layer of a single number; the other layers have the other mark.
    """
    if len(pattern) > 1:
        return pattern[number] == 1
    is_nth = pattern[0] > 0 and (number + 1) % pattern[0] == 0
    return is_nth == (every_nth == 1)
