"""transformers' OLMoE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megalite.checkpoint.convert.families.biases import read_biases, write_biases
from megalite.checkpoint.convert.families.experts import (
    FUSED_EXPERTS,
    expert_modules,
    read_experts,
    write_experts,
)
from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.checkpoint.convert.families.llama import LLAMA, read_llama_like, write_llama_like
from megalite.checkpoint.convert.families.qwen3 import QK_NORMS
from megalite.config import ModelConfig

_WIDTH = "intermediate_size"


def _read(hf: HFSettings) -> dict[str, Any]:
    hf.require("olmoe", output_router_logits=False)
    return {
        **read_llama_like(hf, positions=4096, epsilon=1e-5),
        **read_biases(hf),
        **read_experts(hf, ("num_experts", "num_local_experts"), _WIDTH),
        "moe_router_pre_softmax": not hf.switch("norm_topk_prob", False),
        "clip_qkv": hf.get("clip_qkv"),
        "qk_layernorm": True,
        "qk_layernorm_width": "all_heads",
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_llama_like(config),
        **write_biases(config),
        **write_experts(config, "num_experts", _WIDTH),
        "clip_qkv": config.clip_qkv,
        "norm_topk_prob": not config.moe_router_pre_softmax,
    }


OLMOE = replace(
    LLAMA,
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    read=_read,
    write=_write,
    layer=(
        *(module for module in LLAMA.layer if ".mlp." not in module.ours),
        *QK_NORMS,
        *expert_modules("model.layers.{}.mlp", "gate_proj", "up_proj", "down_proj"),
    ),
    experts=FUSED_EXPERTS,
)
