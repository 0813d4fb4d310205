"""Compare models by their fields: which have an effect, and which values mean the same model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megalite.config.fields import ConfigField, config_fields, without_effect
from megalite.config.model.model_config import MOST_LAYERS, ModelConfig
from megalite.config.option import OnResume

MODEL_FIELDS: Mapping[str, ConfigField] = {
    field.name: field for field in config_fields() if field.group == "model"
}
"""The fields of `ModelConfig`, by their names."""

MAMBA_OPTIONS = tuple(name for name in MODEL_FIELDS if name.startswith("mamba_"))
"""Fields of layers with Mamba-2."""


def inactive_options(model: ModelConfig) -> dict[str, str]:
    """Return the fields of the model without effect, each with the reason."""
    return without_effect(MODEL_FIELDS.values(), vars(model))


def resolved_fields(model: ModelConfig) -> dict[str, Any]:
    """Return the fields that determine the model, with resolved defaults, and None if without effect."""
    fields = {
        name: getattr(model, name)
        for name, field in MODEL_FIELDS.items()
        if field.on_resume is OnResume.MODEL
    }
    scalar, base_head = model.query_pre_attn_scalar, model.mup_base_head_dim
    divisor = model.squared_score_divisor(model.head_dim)
    has_table = model.position_embedding_type == "learned_absolute"
    return {
        **fields,
        "ffn_hidden_size": model.ffn_size,
        "num_query_groups": model.num_kv_heads,
        "kv_channels": model.head_dim,
        "query_pre_attn_scalar": None if scalar == model.head_dim else scalar,  # its default
        "latent_norm_epsilon": model.latent_epsilon,
        "mup_base_width": None if model.width_ratio == 1.0 else model.mup_base_width,
        "mup_base_head_dim": None if divisor == model.head_dim else base_head,
        # Without a table of positions the longest context does not change the model.
        "max_position_embeddings": model.num_positions if has_table else None,
        "num_experts": model.num_experts if model.has_experts else None,
        "moe_ffn_hidden_size": model.expert_ffn_size,
        "mamba_num_heads": model.mamba.num_heads,
        "mamba_bias": model.has_mamba_bias,
        **_resolved_patterns(model),
        **dict.fromkeys(name for name in inactive_options(model) if name in fields),
        **({} if model.has_mamba else dict.fromkeys(MAMBA_OPTIONS)),
    }


def _resolved_patterns(model: ModelConfig) -> dict[str, Any]:
    """Return the fields that select layers, as a mark for each layer, and those of layers with a window.

    A pattern that makes no difference between layers is None.
    """
    specs = [model.layer_spec(number) for number in range(min(model.num_layers, MOST_LAYERS))]
    attention = [spec.attention for spec in specs]
    windows = tuple(int(spec is not None and spec.window is not None) for spec in attention)
    has_rope = model.position_embedding_type == "rope"
    unrotated = tuple(int(spec is not None and has_rope and spec.rotary is None) for spec in attention)
    recurrent = tuple(int(spec is None) for spec in attention)
    with_experts = tuple(int(spec.experts is not None) for spec in specs)
    as_values = tuple(int(spec is not None and spec.keys_as_values) for spec in attention)
    shared_width = model.kv_shared_ffn_hidden_size
    has_shared_width = any(spec is not None and spec.key_source is not None for spec in attention)
    has_shared_width &= shared_width != model.ffn_size
    full = [spec for spec in attention if spec is not None and spec.window is None]
    own_sizes = {
        "full_attention_kv_channels": _first((spec.head_dim for spec in full), model.head_dim),
        "full_attention_query_groups": _first((spec.num_kv_heads for spec in full), model.num_kv_heads),
        "keys_as_values": as_values if any(as_values) else "none",
        "kv_shared_ffn_hidden_size": shared_width if has_shared_width else None,
    }
    rotary = {
        "window_rotary_base": model.window_rotary_base or model.rotary_base,
        "window_rope_scaling": model.window_rope_scaling,
    }
    return {
        "window_attn_skip_freq": windows if any(windows) and not all(windows) else None,
        "no_rope_freq": unrotated if any(unrotated) else None,
        "linear_attention_freq": recurrent if not all(recurrent) else None,
        "moe_layer_freq": with_experts if not all(with_experts) else None,
        **({"ffn_hidden_size": None} if all(with_experts) and not model.moe_beside_mlp else {}),
        **own_sizes,
        **(rotary if any(windows) else dict.fromkeys(rotary)),
    }


def _first(sizes: Iterable[int], default: int) -> int | None:
    """Return the first size that is not the default, if there is one."""
    return next((size for size in sizes if size != default), None)
