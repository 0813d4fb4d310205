"""Rules for multi-latent attention."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.config import Config
from megalite.config.flags import flag_with_value
from megalite.errors import Problem

_MLA = "--multi-latent-attention"


def latent_attention(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check that multi-latent attention has rotary positions, and no options of other attention."""
    model = config.model
    if not model.multi_latent_attention:
        return
    if model.position_embedding_type != "rope":
        yield Problem(
            ("multi_latent_attention", "position_embedding_type"),
            f"{_MLA} with --position-embedding-type {model.position_embedding_type}: pass "
            "--position-embedding-type rope",
        )
    if model.qk_pos_emb_head_dim % 2:
        size = model.qk_pos_emb_head_dim
        yield Problem(
            ("qk_pos_emb_head_dim",),
            f"--qk-pos-emb-head-dim {size}: rotary positions rotate pairs, pass {size + 1}",
        )
    groups = model.num_query_groups
    if groups not in (None, model.num_attention_heads):
        yield Problem(
            ("multi_latent_attention", "num_query_groups"),
            f"--num-query-groups {groups} with {_MLA}, where each head has its own keys: remove it",
        )
    if model.qk_layernorm and model.qk_layernorm_width != "head":
        yield Problem(
            ("multi_latent_attention", "qk_layernorm_width"),
            f"--qk-layernorm-width {model.qk_layernorm_width} with {_MLA}, where --qk-layernorm normalizes "
            "the latents: remove it",
        )
    yield from _without_rule(config)


def _without_rule(config: Config) -> Iterator[Problem]:
    """Refuse options for which multi-latent attention has no rule."""
    model, training = config.model, config.training
    refused = (
        (
            "add_bias_linear",
            model.add_bias_linear,
            "its projections from latents have no biases; pass --disable-bias-linear",
        ),
        ("attention_output_gate", model.attention_output_gate, "its queries have no gates; remove it"),
        ("rotary_percent", model.rotary_percent != 1.0, "pass --qk-pos-emb-head-dim instead"),
        ("num_kv_shared_layers", model.num_kv_shared_layers > 0, "whose layers share no keys; remove it"),
        ("keys_as_values", model.keys_as_values != "none", "whose values are no keys; remove it"),
        ("value_layernorm", model.value_layernorm, "whose values have no norm; remove it"),
        (
            "full_attention_kv_channels",
            model.full_attention_kv_channels is not None,
            "all layers have heads of one size; remove it",
        ),
        (
            "full_attention_query_groups",
            model.full_attention_query_groups is not None,
            "each head has its own keys; remove it",
        ),
        ("clip_qkv", model.clip_qkv is not None, "whose keys and values are latents; remove it"),
        ("qk_clip", model.qk_clip, "whose keys have a part that all heads share; remove it"),
        ("mup_base_width", model.mup_base_width is not None, "muP has no rule for latents; remove it"),
        ("fp8_format", training.fp8_format is not None, "latents have no 8-bit GEMMs; remove it"),
    )
    for name, is_set, why in refused:
        if is_set:
            value = getattr(training if name == "fp8_format" else model, name)
            setting = "biases" if name == "add_bias_linear" else flag_with_value(name, value)
            yield Problem(("multi_latent_attention", name), f"{setting} with {_MLA}: {why}")
