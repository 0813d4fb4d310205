"""transformers' GLM-4.5."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megalite.checkpoint.convert.families.deepseek_experts import (
    EXPERTS,
    first_dense_layers,
    read_biased_scores,
    read_experts_after,
    write_experts_after,
)
from megalite.checkpoint.convert.families.experts import FUSED_EXPERTS, modules_with_some_experts
from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.checkpoint.convert.families.llama import LLAMA, read_llama_like, write_llama_like
from megalite.checkpoint.convert.families.qwen3 import QK_NORMS
from megalite.checkpoint.convert.families.rotary import read_rotary
from megalite.config import ModelConfig


def _read(hf: HFSettings) -> dict[str, Any]:
    hf.require("glm4_moe", output_router_logits=False)
    rotary = read_rotary(hf, share=hf.get("partial_rotary_factor", 0.5))
    fields = {
        **read_llama_like(hf, positions=131072, epsilon=1e-5, rotary=rotary),
        "add_qkv_bias": hf.switch("attention_bias", False),
        "qk_layernorm": hf.switch("use_qk_norm", False),
    }
    first_dense = first_dense_layers(hf, default=1)
    if first_dense >= fields["num_layers"]:
        return fields
    experts = read_experts_after(hf, first_dense, factor=1.0)
    return {**fields, **experts, **read_biased_scores(hf, "glm4_moe", experts["moe_router_topk"])}


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_llama_like(config),
        **write_experts_after(config),
        "head_dim": config.head_dim,
        "partial_rotary_factor": config.rotary_percent,
        "attention_bias": config.has_qkv_bias,
        "use_qk_norm": config.qk_layernorm,
    }


GLM4_MOE = replace(
    LLAMA,
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    read=_read,
    write=_write,
    layer=(
        *modules_with_some_experts(LLAMA.layer, EXPERTS),
        *(replace(each, only_if=lambda config: config.qk_layernorm) for each in QK_NORMS),
    ),
    experts=FUSED_EXPERTS,
)
