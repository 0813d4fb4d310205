"""Read and write the settings of rotary positions, which transformers has in one object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.checkpoint.convert.families.windows import FULL, WINDOW
from megalite.checkpoint.convert.model_settings import none_if_default
from megalite.config import ModelConfig
from megalite.errors import UserError

_KINDS = {
    "default": "none",
    "linear": "linear",
    "llama3": "llama3",
    "yarn": "yarn",
    "proportional": "proportional",
}
_THEIR_KINDS = {ours: theirs for theirs, ours in _KINDS.items()}
_NAMES: dict[str, dict[str, str]] = {
    "none": {},
    "linear": {"factor": "rope_scaling_factor"},
    "llama3": {
        "factor": "rope_scaling_factor",
        "original_max_position_embeddings": "original_max_position_embeddings",
        "low_freq_factor": "rope_low_freq_factor",
        "high_freq_factor": "rope_high_freq_factor",
    },
    "yarn": {
        "factor": "rope_scaling_factor",
        "original_max_position_embeddings": "original_max_position_embeddings",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
        "truncate": "yarn_truncate",
        "attention_factor": "yarn_attention_factor",
        "mscale": "yarn_mscale",
        "mscale_all_dim": "yarn_mscale_all_dim",
    },
    "proportional": {"partial_rotary_factor": "proportional_rotary_share"},
}
"""Our fields for the settings of each kind of scaling."""
_WHOLE = {"original_max_position_embeddings", "yarn_truncate"}
_REQUIRED = {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}


def read_rotary(
    hf: HFSettings, base: float = 10000.0, old_base: str = "rope_theta", share: float | None = None
) -> dict[str, Any]:
    """Return our fields. Since version 5 of transformers the settings are in `rope_parameters`.

    Args:
        base: base of the angles if the config does not have it.
        old_base: name of the base in older versions.
        share: share of a head's elements that are rotated, if the config does not have it; None if the family
            rotates all of them.
    """
    current, old, theta = hf.get("rope_parameters"), hf.get("rope_scaling"), hf.get(old_base)
    return rotary_fields(current or old or {}, theta or base, share)


def read_rotary_by_layer(
    hf: HFSettings, base: float, window_base: float | None = None, old_window_base: str = ""
) -> dict[str, Any]:
    """Return our fields for a family with other rotary positions in layers with a window.

    Args:
        base: base of the angles in layers without a window, if the config does not have it.
        window_base: the same with a window; by default the other layers' base.
        old_window_base: name of the base in layers with a window in older versions, if it had one.
    """
    kinds = HFSettings(hf.get("rope_parameters") or {}, "transformers' rope_parameters")
    old, theta = hf.get("rope_scaling"), hf.get("rope_theta")
    full = rotary_fields(kinds.get(FULL) or old or {}, theta or base, None)
    old_base = hf.get(old_window_base) if old_window_base else None
    windows = rotary_fields(kinds.get(WINDOW) or {}, old_base or window_base or full["rotary_base"], None)
    kinds.refuse_unread("rotary positions by kind of layer")
    own_base = windows.pop("rotary_base")
    is_scaled = windows["rope_scaling"] != "none"
    if is_scaled and any(full.get(name) != value for name, value in windows.items()):
        raise UserError(f"rope_parameters of {WINDOW} cannot be converted: only {FULL}'s or 'default' can")
    return {
        **full,
        "window_rotary_base": none_if_default(own_base, full["rotary_base"]),
        "window_rope_scaling": is_scaled or full["rope_scaling"] == "none",
    }


def rotary_fields(settings: Mapping[str, Any], theta: float, share: float | None) -> dict[str, Any]:
    """Return our fields for one object of settings.

    Args:
        theta: base of the angles if the object does not have it.
        share: see `read_rotary`.
    """
    rope = HFSettings(settings, "transformers' rope_parameters")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _KINDS:
        raise UserError(f"rope_type {kind!r} cannot be converted: {', '.join(_KINDS)} can")
    fields: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rotary_base": float(rope.get("rope_theta") or theta),
        "rope_scaling": _KINDS[kind],
    }
    if kind == "proportional":
        rope.require(f"rope_type {kind!r}", factor=1.0)
        fields["proportional_rotary_share"] = 1.0  # theirs by default
    elif share is None:
        rope.require(f"rope_type {kind!r}", partial_rotary_factor=1.0)
    else:
        fields["rotary_percent"] = float(rope.get("partial_rotary_factor", share))
    for theirs, ours in _NAMES[_KINDS[kind]].items():
        value = rope.get(theirs)
        if value is not None:
            fields[ours] = value if ours in _WHOLE else float(value)
        elif theirs in _REQUIRED:
            raise UserError(f"rope_type {kind!r} without {theirs} cannot be converted")
    rope.refuse_unread(f"rope_type {kind!r}")
    return fields


def write_rotary(config: ModelConfig, old_base: str = "rope_theta") -> dict[str, Any]:
    """Return transformers' settings, under names that older versions read too."""
    written: dict[str, Any] = {old_base: config.rotary_base}
    if config.rope_scaling != "none":
        written["rope_scaling"] = scaling_of(config)
    return written


def write_rotary_by_layer(config: ModelConfig, old_window_base: str = "") -> dict[str, Any]:
    """Return transformers' settings, under names that older versions read too; see `read_rotary_by_layer`."""
    old_window = {old_window_base: config.window_rotary_base or config.rotary_base} if old_window_base else {}
    return {**write_rotary(config), **old_window, **write_rotary_by_kind(config)}


def write_rotary_by_kind(config: ModelConfig) -> dict[str, Any]:
    """Return transformers' settings by kind of layer; a family that came later has no others."""
    base = config.window_rotary_base or config.rotary_base
    scaling = scaling_of(config) if config.window_rope_scaling else {"rope_type": "default"}
    full = {**scaling_of(config), "rope_theta": config.rotary_base}
    return {"rope_parameters": {FULL: full, WINDOW: {**scaling, "rope_theta": base}}}


def scaling_of(config: ModelConfig) -> dict[str, Any]:
    """Return transformers' settings of the scaling, without the base."""
    values = {theirs: getattr(config, ours) for theirs, ours in _NAMES[config.rope_scaling].items()}
    known = {name: value for name, value in values.items() if value is not None}
    return {"rope_type": _THEIR_KINDS[config.rope_scaling], **known}
