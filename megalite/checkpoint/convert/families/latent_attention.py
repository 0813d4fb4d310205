"""Read and write the multi-latent attention of DeepSeek-V2 and V3."""

from __future__ import annotations

from typing import Any

from megalite.checkpoint.convert.families.biases import read_biases, write_biases
from megalite.checkpoint.convert.families.family import Module
from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.checkpoint.convert.families.llama import read_llama_like, write_llama_like
from megalite.config import ModelConfig

_LATENT_EPSILON = 1e-6
"""Epsilon of the norms of latents, which the config does not have."""
_SIZES = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
}


def read_latent_attention(hf: HFSettings, kind: str) -> dict[str, Any]:
    """Return our fields for the settings of dense models that DeepSeek-V2 and V3 share.

    Args:
        kind: name of the family, for messages.
    """
    heads = hf["num_attention_heads"]
    hf.require(kind, mlp_bias=False)
    if hf.get("num_key_value_heads") is not None:
        hf.require(kind, num_key_value_heads=heads)
    return {
        **read_llama_like(hf),
        **read_biases(hf),
        "latent_norm_epsilon": _LATENT_EPSILON,
        "num_query_groups": None,
        "kv_channels": None,
        "multi_latent_attention": True,
        "qk_layernorm": True,
        **{ours: hf.get(theirs) for theirs, ours in _SIZES.items()},
    }


def write_latent_attention(config: ModelConfig) -> dict[str, Any]:
    """Return the settings that DeepSeek-V2 and V3 share."""
    return {
        **write_llama_like(config),
        **write_biases(config),
        "num_key_value_heads": config.num_attention_heads,
        **{theirs: getattr(config, ours) for theirs, ours in _SIZES.items()},
    }


def _has_query_latent(config: ModelConfig) -> bool:
    return config.q_lora_rank is not None


def _has_no_query_latent(config: ModelConfig) -> bool:
    return config.q_lora_rank is None


_OURS, _THEIRS = "layers.{}.attention.", "model.layers.{}.self_attn."
LATENT_ATTENTION = (
    Module("qkv", _OURS + "query_down", (_THEIRS + "q_a_proj",), only_if=_has_query_latent),
    Module("norm", _OURS + "query_norm", (_THEIRS + "q_a_layernorm",), only_if=_has_query_latent),
    Module("linear", _OURS + "query_up", (_THEIRS + "q_b_proj",), only_if=_has_query_latent),
    Module("linear", _OURS + "query_up", (_THEIRS + "q_proj",), only_if=_has_no_query_latent),
    Module("qkv", _OURS + "key_value_down", (_THEIRS + "kv_a_proj_with_mqa",)),
    Module("norm", _OURS + "key_value_norm", (_THEIRS + "kv_a_layernorm",)),
    Module("linear", _OURS + "key_value_up", (_THEIRS + "kv_b_proj",)),
)
"""Modules of a layer besides the projection of its output."""
