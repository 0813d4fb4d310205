"""transformers' DeepSeek-V3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megalite.checkpoint.convert.families.family import Module
from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.checkpoint.convert.families.llama import LLAMA, read_llama_like, write_llama_like
from megalite.config import ModelConfig
from megalite.errors import UserError

_LATENT_EPSILON = 1e-6
"""Epsilon of the norms of latents, which the config does not have."""
_SIZES = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
}
OF_EXPERTS = (
    *("n_routed_experts", "num_local_experts", "num_experts", "n_shared_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "moe_layer_freq", "ep_size", "n_group", "topk_group", "topk_method"),
    *("norm_topk_prob", "routed_scaling_factor", "scoring_func", "aux_loss_alpha", "seq_aux"),
    *("output_router_logits", "router_aux_loss_coef"),
)
"""Settings of experts, without effect in a dense model."""
OF_OTHER_TOKENS = ("num_nextn_predict_layers", "num_mtp_layers")
"""Settings of layers after the model, which predict further tokens."""


def _read(hf: HFSettings) -> dict[str, Any]:
    fields = read_latent_attention(hf, "deepseek_v3", first_dense=3)
    return {**fields, "rotary_interleaved": hf.switch("rope_interleave", True)}


def read_latent_attention(hf: HFSettings, kind: str, first_dense: int) -> dict[str, Any]:
    """Return our fields for the settings that DeepSeek-V2 and V3 share.

    Args:
        kind: name of the family, for messages.
        first_dense: default of `first_k_dense_replace`.
    """
    heads, layers = hf["num_attention_heads"], hf["num_hidden_layers"]
    hf.require(kind, attention_bias=False, mlp_bias=False, rms_norm_eps=_LATENT_EPSILON)
    if hf.get("num_key_value_heads") is not None:
        hf.require(kind, num_key_value_heads=heads)
    if hf.get("first_k_dense_replace", first_dense) < layers:
        raise UserError(
            f"{kind} with experts (first_k_dense_replace below num_hidden_layers {layers}) cannot be "
            "converted"
        )
    return {
        **read_llama_like(hf, epsilon=_LATENT_EPSILON),
        "num_query_groups": None,
        "kv_channels": None,
        "multi_latent_attention": True,
        "qk_layernorm": True,
        **{ours: hf.get(theirs) for theirs, ours in _SIZES.items()},
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    return {**write_latent_attention(config), "rope_interleave": config.rotary_interleaved}


def write_latent_attention(config: ModelConfig) -> dict[str, Any]:
    """Return the settings that DeepSeek-V2 and V3 share."""
    return {
        **write_llama_like(config),
        "num_key_value_heads": config.num_attention_heads,
        **{theirs: getattr(config, ours) for theirs, ours in _SIZES.items()},
        "rms_norm_eps": _LATENT_EPSILON,
        "first_k_dense_replace": config.num_layers,
    }


def _has_query_latent(config: ModelConfig) -> bool:
    return config.q_lora_rank is not None


def _has_no_query_latent(config: ModelConfig) -> bool:
    return config.q_lora_rank is None


_OURS, _THEIRS = "layers.{}.attention.", "model.layers.{}.self_attn."
DEEPSEEK_V3 = replace(
    LLAMA,
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    read=_read,
    write=_write,
    layer=(
        *(module for module in LLAMA.layer if module.kind != "qkv"),
        Module("linear", _OURS + "query_down", (_THEIRS + "q_a_proj",), only_if=_has_query_latent),
        Module("norm", _OURS + "query_norm", (_THEIRS + "q_a_layernorm",), only_if=_has_query_latent),
        Module("linear", _OURS + "query_up", (_THEIRS + "q_b_proj",), only_if=_has_query_latent),
        Module("linear", _OURS + "query_up", (_THEIRS + "q_proj",), only_if=_has_no_query_latent),
        Module("linear", _OURS + "key_value_down", (_THEIRS + "kv_a_proj_with_mqa",)),
        Module("norm", _OURS + "key_value_norm", (_THEIRS + "kv_a_layernorm",)),
        Module("linear", _OURS + "key_value_up", (_THEIRS + "kv_b_proj",)),
    ),
    without_effect=(*OF_EXPERTS, *OF_OTHER_TOKENS, "qk_head_dim"),  # the last is a sum of sizes
)
