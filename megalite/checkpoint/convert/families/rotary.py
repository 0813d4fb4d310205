"""Read and write the settings of rotary positions, which transformers has in one object."""

from __future__ import annotations

from typing import Any

from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.config import ModelConfig
from megalite.errors import UserError

_KINDS = {
    "default": "none",
    "linear": "linear",
    "llama3": "llama3",
    "yarn": "yarn",
}
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
    rope = HFSettings(current or old or {}, "transformers' rope_parameters")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _KINDS:
        raise UserError(f"rope_type {kind!r} cannot be converted: {', '.join(_KINDS)} can")
    fields: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rotary_base": float(rope.get("rope_theta") or theta or base),
        "rope_scaling": _KINDS[kind],
    }
    if share is None:
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
        values = {theirs: getattr(config, ours) for theirs, ours in _NAMES[config.rope_scaling].items()}
        known = {name: value for name, value in values.items() if value is not None}
        written["rope_scaling"] = {"rope_type": config.rope_scaling, **known}
    return written
