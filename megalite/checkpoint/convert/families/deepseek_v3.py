"""transformers' DeepSeek-V3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megalite.checkpoint.convert.families.experts import FUSED_EXPERTS, expert_modules
from megalite.checkpoint.convert.families.family import HALVES, Module
from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.checkpoint.convert.families.llama import LLAMA, read_llama_like, write_llama_like
from megalite.config import LayerKind, ModelConfig
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
_OF_EXPERTS = (
    *("n_routed_experts", "num_local_experts", "num_experts", "n_shared_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "n_group", "topk_group", "topk_method", "norm_topk_prob"),
    *("routed_scaling_factor", "scoring_func", "aux_loss_alpha"),
)
"""Settings of experts, without effect in a dense model."""
_OF_TRAINING = ("ep_size", "seq_aux", "output_router_logits", "router_aux_loss_coef")
_OF_OTHER_TOKENS = ("num_nextn_predict_layers", "num_mtp_layers")
"""Settings of layers after the model, which predict further tokens."""


def _read(hf: HFSettings) -> dict[str, Any]:
    fields = read_latent_attention(hf, "deepseek_v3")
    fields["rotary_interleaved"] = hf.switch("rope_interleave", True)
    first_dense = first_dense_layers(hf, default=3)
    if first_dense >= fields["num_layers"]:
        return fields
    hf.require("deepseek_v3", topk_method="noaux_tc", norm_topk_prob=True, scoring_func="sigmoid")
    groups, selected = hf.get("n_group", 8), hf.get("topk_group", 4)
    has_groups = (groups, selected) != (1, 1)
    experts = read_deepseek_experts(hf, first_dense)
    if experts["moe_router_topk"] == 1:
        raise UserError("deepseek_v3 with num_experts_per_tok 1, whose weight is its score here and 1 there")
    return {
        **fields,
        **experts,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": groups if has_groups else None,
        "moe_router_group_topk": selected if has_groups else None,
    }


def first_dense_layers(hf: HFSettings, default: int) -> int:
    """Return the number of layers before the first one with experts; without any, all settings are read."""
    count = hf.get("first_k_dense_replace", default)
    if count >= hf["num_hidden_layers"]:
        hf.names_read.update(_OF_EXPERTS)
    return int(count)


def read_latent_attention(hf: HFSettings, kind: str) -> dict[str, Any]:
    """Return our fields for the settings of dense models that DeepSeek-V2 and V3 share.

    Args:
        kind: name of the family, for messages.
    """
    heads = hf["num_attention_heads"]
    hf.require(kind, attention_bias=False, mlp_bias=False, rms_norm_eps=_LATENT_EPSILON, moe_layer_freq=1)
    if hf.get("num_key_value_heads") is not None:
        hf.require(kind, num_key_value_heads=heads)
    return {
        **read_llama_like(hf, epsilon=_LATENT_EPSILON),
        "num_query_groups": None,
        "kv_channels": None,
        "multi_latent_attention": True,
        "qk_layernorm": True,
        **{ours: hf.get(theirs) for theirs, ours in _SIZES.items()},
    }


def read_deepseek_experts(hf: HFSettings, first_dense: int) -> dict[str, Any]:
    """Return our fields for the settings of experts that DeepSeek-V2 and V3 share.

    Args:
        first_dense: number of layers before the first one with experts.
    """
    layers, width = hf["num_hidden_layers"], hf["moe_intermediate_size"]
    return {
        "num_experts": hf.first("n_routed_experts", "num_local_experts", "num_experts"),
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": width * hf["n_shared_experts"],
        "moe_layer_freq": (0,) * first_dense + (1,) * (layers - first_dense) if first_dense else None,
        "moe_router_topk_scaling_factor": float(hf.get("routed_scaling_factor", 1.0)),
        "moe_aux_loss_coeff": float(hf.get("aux_loss_alpha", 0.0)),
    }


def write_deepseek_experts(config: ModelConfig) -> dict[str, Any]:
    """Return the settings of experts that DeepSeek-V2 and V3 share; none of a dense model."""
    dense = [not kind.has_experts for kind in config.layer_kinds]
    if all(dense):
        return {"first_k_dense_replace": config.num_layers}
    return {
        "first_k_dense_replace": dense.index(False),
        "n_routed_experts": config.num_experts,
        "num_experts_per_tok": config.moe_router_topk,
        "moe_intermediate_size": config.expert_ffn_size,
        "n_shared_experts": (config.moe_shared_expert_intermediate_size or 0) // config.expert_ffn_size,
        "routed_scaling_factor": config.moe_router_topk_scaling_factor,
        "aux_loss_alpha": config.moe_aux_loss_coeff,
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_latent_attention(config),
        "n_group": config.moe_router_num_groups or 1,
        "topk_group": config.moe_router_group_topk or 1,
        "rope_interleave": config.rotary_interleaved,
    }


def write_latent_attention(config: ModelConfig) -> dict[str, Any]:
    """Return the settings that DeepSeek-V2 and V3 share."""
    return {
        **write_llama_like(config),
        "num_key_value_heads": config.num_attention_heads,
        **{theirs: getattr(config, ours) for theirs, ours in _SIZES.items()},
        "rms_norm_eps": _LATENT_EPSILON,
        **write_deepseek_experts(config),
    }


def _has_query_latent(config: ModelConfig) -> bool:
    return config.q_lora_rank is not None


def _has_no_query_latent(config: ModelConfig) -> bool:
    return config.q_lora_rank is None


def _has_experts(kind: LayerKind) -> bool:
    return kind.has_experts


def _only_dense(module: Module) -> Module:
    """Return a module of Llama that layers with experts do not have if it belongs to the MLP."""
    if ".mlp." not in module.ours:
        return module
    return replace(module, only_in=lambda kind: not kind.has_experts)


_OURS, _THEIRS, _MLP = "layers.{}.attention.", "model.layers.{}.self_attn.", "model.layers.{}.mlp"
DEEPSEEK_V3 = replace(
    LLAMA,
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    read=_read,
    write=_write,
    layer=(
        *(_only_dense(module) for module in LLAMA.layer if module.kind != "qkv"),
        Module("linear", _OURS + "query_down", (_THEIRS + "q_a_proj",), only_if=_has_query_latent),
        Module("norm", _OURS + "query_norm", (_THEIRS + "q_a_layernorm",), only_if=_has_query_latent),
        Module("linear", _OURS + "query_up", (_THEIRS + "q_b_proj",), only_if=_has_query_latent),
        Module("linear", _OURS + "query_up", (_THEIRS + "q_proj",), only_if=_has_no_query_latent),
        Module("linear", _OURS + "key_value_down", (_THEIRS + "kv_a_proj_with_mqa",)),
        Module("norm", _OURS + "key_value_norm", (_THEIRS + "kv_a_layernorm",)),
        Module("linear", _OURS + "key_value_up", (_THEIRS + "kv_b_proj",)),
        *(
            replace(module, only_in=_has_experts)
            for module in (
                *expert_modules(_MLP, "gate_proj", "up_proj", "down_proj"),
                Module(
                    "linear",
                    "layers.{}.mlp.shared.up",
                    tuple(f"{_MLP}.shared_experts.{part}_proj" for part in ("gate", "up")),
                    HALVES,
                ),
                Module(
                    "vector",
                    "layers.{}.mlp.router.expert_bias",
                    (_MLP + ".gate.e_score_correction_bias",),
                    only_if=lambda config: config.moe_router_enable_expert_bias,
                ),
                Module("linear", "layers.{}.mlp.shared.down", (_MLP + ".shared_experts.down_proj",)),
            )
        ),
    ),
    without_effect=(*_OF_TRAINING, *_OF_OTHER_TOKENS, "qk_head_dim"),  # the last is a sum of sizes
    experts=FUSED_EXPERTS,
)
