"""transformers' Qwen 2 with experts: Qwen1.5-MoE and Qwen2-57B-A14B."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megalite.checkpoint.convert.families.experts import FUSED_EXPERTS, modules_with_some_experts
from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.checkpoint.convert.families.llama import LLAMA, read_llama_like, write_llama_like
from megalite.checkpoint.convert.families.sparse_experts import (
    GATED_EXPERTS,
    read_gated_experts,
    write_gated_experts,
)
from megalite.checkpoint.convert.families.windows import read_windows, write_windows
from megalite.config import ModelConfig
from megalite.errors import UserError


def _read(hf: HFSettings) -> dict[str, Any]:
    fields = read_llama_like(hf, positions=32768)
    if hf.get("use_sliding_window", False) and hf.get("layer_types") is None:
        raise UserError("qwen2_moe with use_sliding_window cannot be converted without layer_types")
    return {
        **fields,
        **read_windows(hf, fields),
        **read_gated_experts(hf, "qwen2_moe", fields["num_layers"]),
        "add_qkv_bias": hf.switch("qkv_bias", True),
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_llama_like(config),
        **write_windows(config),
        **write_gated_experts(config),
        "head_dim": config.head_dim,
        "qkv_bias": config.has_qkv_bias,
    }


QWEN2_MOE = replace(
    LLAMA,
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    read=_read,
    write=_write,
    layer=modules_with_some_experts(LLAMA.layer, GATED_EXPERTS),
    experts=FUSED_EXPERTS,
)
