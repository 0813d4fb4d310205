"""transformers' Qwen3-Next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megalite.checkpoint.convert.families.biases import read_biases, write_biases
from megalite.checkpoint.convert.families.delta_net import (
    TWO_PROJECTIONS,
    delta_net_modules,
    read_delta_net,
    write_delta_net,
)
from megalite.checkpoint.convert.families.experts import FUSED_EXPERTS, modules_with_some_experts
from megalite.checkpoint.convert.families.gated_attention import GATED_ATTENTION
from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.checkpoint.convert.families.llama import read_llama_like, write_llama_like
from megalite.checkpoint.convert.families.qwen3 import QWEN3
from megalite.checkpoint.convert.families.rotary import read_rotary
from megalite.checkpoint.convert.families.sparse_experts import (
    GATED_EXPERTS,
    read_gated_experts,
    write_gated_experts,
)
from megalite.checkpoint.convert.model_settings import none_if_default
from megalite.config import ModelConfig


def _read(hf: HFSettings) -> dict[str, Any]:
    share = hf.get("partial_rotary_factor", 0.25)
    fields = read_hybrid(hf, "qwen3_next", read_rotary(hf, 10000.0, share=share))
    return {**fields, **read_gated_experts(hf, "qwen3_next", fields["num_layers"], norm_topk_prob=True)}


def read_hybrid(
    hf: HFSettings, kind: str, rotary: dict[str, Any], width: str = "intermediate_size"
) -> dict[str, Any]:
    """Return our fields for the settings that Qwen3-Next and Qwen3.5 share.

    Args:
        kind: name of the family, for messages.
        rotary: our fields of rotary positions.
        width: their name of the MLP's width.
    """
    fields = read_llama_like(hf, positions=32768, rotary=rotary, width=width)
    usual = fields["hidden_size"] // fields["num_attention_heads"]
    return {
        **fields,
        **read_biases(hf),
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
        **write_biases(config),
        **write_delta_net(config),
        "head_dim": config.head_dim,
        "partial_rotary_factor": config.rotary_percent,
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    return {**write_hybrid(config), **write_gated_experts(config)}


_SHARED = tuple(module for module in QWEN3.layer if ".attention." not in module.ours)
QWEN3_NEXT = replace(
    QWEN3,
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    read=_read,
    write=_write,
    layer=(
        *modules_with_some_experts(_SHARED, GATED_EXPERTS),
        *GATED_ATTENTION,
        *delta_net_modules("model.layers.{}.linear_attn", ("in_proj_qkvz", "in_proj_ba"), TWO_PROJECTIONS),
    ),
    experts=FUSED_EXPERTS,
    mtp=(),  # its files have other names for these modules
)
