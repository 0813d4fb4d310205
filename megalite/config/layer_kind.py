"""What distinguishes layers of one model, and the patterns that select layers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerKind:
    """Describes in what a layer differs from other layers of its model.

    Attributes:
        window: largest number of keys before its own that a query attends to; None without this limit.
        rotary: whether queries and keys are rotated by their position, in a model with rope.
        own_rotary: whether they are rotated with the base and scaling of layers with a window, which differ
            from those of other layers.
        has_experts: whether the MLP is a mixture of experts.
        head_dim: size of one attention head, if it is not the model's `head_dim`.
        num_kv_heads: number of key/value heads, if it is not the model's `num_kv_heads`.
        keys_as_values: whether the values are the keys before their norm and rotation.
        key_source: number of the earlier layer whose keys and values the layer attends to; None for its own.
        gives_keys: whether later layers may attend to the layer's keys and values.
    """

    window: int | None = None
    rotary: bool = True
    own_rotary: bool = False
    has_experts: bool = False
    head_dim: int | None = None
    num_kv_heads: int | None = None
    keys_as_values: bool = False
    key_source: int | None = None
    gives_keys: bool = False


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
