"""The kinds of a model's layers, and the patterns that select layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class LayerKind:
    """Properties in which a layer can differ from the other layers of its model.

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
        mixer: what lets a token see earlier ones: attention, a recurrent mixer (`MIXERS`), or none.
        has_mlp: whether the layer has an MLP, or experts in its place.
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
    mixer: Literal["attention", "gated_delta_net", "mamba", "none"] = "attention"
    has_mlp: bool = True

    @property
    def is_recurrent(self) -> bool:
        """Return whether the layer has a recurrent mixer."""
        return self.mixer not in ("attention", "none")


HYBRID_KINDS: Mapping[str, LayerKind] = {
    "M": LayerKind(mixer="mamba", has_mlp=False),
    "*": LayerKind(has_mlp=False),
    "-": LayerKind(mixer="none"),
    "E": LayerKind(mixer="none", has_experts=True),
}
"""Kinds of layers with one block, by their letters in --hybrid-override-pattern."""


def kind_of_layer(model: Any, number: int) -> LayerKind:
    """Return the kind of a layer of a `ModelConfig` by its number in the whole model.

    Modules of multi-token prediction have the numbers after it, and the last layer's kind.
    """
    number = min(number, model.num_layers - 1)
    if model.hybrid_override_pattern is not None:
        return HYBRID_KINDS.get(model.hybrid_override_pattern[number : number + 1], LayerKind())
    if model.recurrent_mixer != "none" and _is_recurrent(model, number):
        return LayerKind(has_experts=_has_experts(model, number), mixer=model.recurrent_mixer)
    window, rotary = _window_and_rotary(model, number)
    is_full = window is None
    head_dim, groups = model.full_attention_kv_channels, model.full_attention_query_groups
    source, gives_keys = _shared_keys(model, number)
    as_values = model.keys_as_values == "all" or (model.keys_as_values == "full_attention" and is_full)
    return LayerKind(
        window=window,
        rotary=rotary,
        own_rotary=not is_full and model.windows_differ_in_rotary,
        has_experts=_has_experts(model, number),
        head_dim=head_dim if is_full and head_dim != model.head_dim else None,
        num_kv_heads=groups if is_full and groups != model.num_kv_heads else None,
        keys_as_values=as_values and source is None,
        key_source=source,
        gives_keys=gives_keys,
    )


def _is_recurrent(model: Any, number: int) -> bool:
    """Return whether a layer has the recurrent mixer, in a model with one."""
    pattern = model.linear_attention_freq
    return pattern is None or _is_marked(pattern, number, every_nth=0)


def _window_and_rotary(model: Any, number: int) -> tuple[int | None, bool]:
    """Return a layer's window, and whether it rotates queries and keys."""
    window, skipped, unrotated = model.window_size, model.window_attn_skip_freq, model.no_rope_freq
    if window is not None and skipped is not None and not _is_marked(skipped, number, every_nth=0):
        window = None
    has_rope = model.position_embedding_type != "rope" or unrotated is None
    return (
        None if window is None else window[0],
        has_rope or not _is_marked(unrotated or (), number, every_nth=1),
    )


def _shared_keys(model: Any, number: int) -> tuple[int | None, bool]:
    """Return the layer whose keys and values a layer attends to, and whether it gives its own to others.

    Layers share keys and values with layers of the same window and rotation only.
    """
    first = model.num_layers - model.num_kv_shared_layers  # that shares
    if first == model.num_layers:
        return None, False
    own = _window_and_rotary(model, number)
    before = (i for i in reversed(range(first)) if _window_and_rotary(model, i) == own)
    last = next(before, None)  # of the layers with keys of their own
    return (last, False) if number >= first else (None, last == number)


def _has_experts(model: Any, number: int) -> bool:
    """Return whether a layer's MLP is a mixture of experts."""
    pattern = model.moe_layer_freq or (1,)
    if not model.has_experts:
        return False
    if len(pattern) > 1:
        return _is_one(pattern, number)
    return pattern[0] > 0 and number % pattern[0] == 0


def _is_marked(pattern: tuple[int, ...], number: int, every_nth: int) -> bool:
    """Return whether a pattern of layers marks a layer with 1.

    Args:
        pattern: a number for each layer, or a single number N.
        every_nth: mark of every Nth layer of a single number; the other layers have the other mark.
    """
    if len(pattern) > 1:
        return _is_one(pattern, number)
    is_nth = pattern[0] > 0 and (number + 1) % pattern[0] == 0
    return is_nth == (every_nth == 1)


def _is_one(pattern: tuple[int, ...], number: int) -> bool:
    """Return whether the pattern has a 1 for a layer; False beyond its end, which a rule refuses."""
    return number < len(pattern) and pattern[number] == 1
