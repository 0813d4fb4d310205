"""transformers' Qwen3-Next, with dense MLPs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megalite.checkpoint.convert.families.delta_net import (
    GATED_QKV,
    TWO_PROJECTIONS,
    delta_net_modules,
    read_delta_net,
    write_delta_net,
)
from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.checkpoint.convert.families.llama import read_llama_like, write_llama_like
from megalite.checkpoint.convert.families.qwen3 import QWEN3
from megalite.checkpoint.convert.families.rotary import read_rotary
from megalite.checkpoint.convert.model_settings import none_if_default
from megalite.config import ModelConfig
from megalite.errors import UserError


def _read(hf: HFSettings) -> dict[str, Any]:
    share = hf.get("partial_rotary_factor", 0.25)
    fields = read_hybrid(hf, "qwen3_next", read_rotary(hf, 10000.0, share=share))
    num_experts, dense = hf.get("num_experts", 512), hf.get("mlp_only_layers") or ()
    if num_experts and not {*range(fields["num_layers"])} <= {*dense}:
        raise UserError(
            f"qwen3_next with num_experts {num_experts} cannot be converted: megalite has no shared experts "
            "with a gate; num_experts 0, or mlp_only_layers of all layers, can"
        )
    return fields


def read_hybrid(hf: HFSettings, kind: str, rotary: dict[str, Any]) -> dict[str, Any]:
    """Return our fields for the settings that Qwen3-Next and Qwen3.5 share.

    Args:
        kind: name of the family, for messages.
        rotary: our fields of rotary positions.
    """
    hf.require(kind, attention_bias=False)
    fields = read_llama_like(hf, positions=32768, rotary=rotary)
    usual = fields["hidden_size"] // fields["num_attention_heads"]
    return {
        **fields,
        **read_delta_net(hf, fields["num_layers"]),
        "kv_channels": none_if_default(hf.get("head_dim", 256), usual),
        "qk_layernorm": True,
        "zero_centered_norms": True,
        "attention_output_gate": True,
    }


def write_hybrid(config: ModelConfig) -> dict[str, Any]:
    """Return the settings that Qwen3-Next and Qwen3.5 share."""
    return {
        **write_llama_like(config),
        **write_delta_net(config),
        "head_dim": config.head_dim,
        "partial_rotary_factor": config.rotary_percent,
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    return {**write_hybrid(config), "num_experts": 0, "mlp_only_layers": [], "decoder_sparse_step": 1}


_SHARED = tuple(module for module in QWEN3.layer if ".attention." not in module.ours)
_ATTENTION = tuple(
    replace(
        module,
        transform=GATED_QKV if module.kind == "qkv" else module.transform,
        only_in=lambda kind: kind.mixer == "attention",
    )
    for module in QWEN3.layer
    if ".attention." in module.ours
)
QWEN3_NEXT = replace(
    QWEN3,
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    read=_read,
    write=_write,
    layer=(
        *_SHARED,
        *_ATTENTION,
        *delta_net_modules("model.layers.{}.linear_attn", ("in_proj_qkvz", "in_proj_ba"), TWO_PROJECTIONS),
    ),
    without_effect=(
        *("decoder_sparse_step", "moe_intermediate_size", "norm_topk_prob", "num_experts_per_tok"),
        *("output_router_logits", "router_aux_loss_coef", "shared_expert_intermediate_size"),
    ),
    mtp=(),  # its files have other names for these modules
)
