"""transformers' Qwen 3 with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megalite.checkpoint.convert.families.experts import (
    FUSED_EXPERTS,
    expert_modules,
    read_experts,
    write_experts,
)
from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.checkpoint.convert.families.qwen3 import QWEN3, read_qwen3_like, write_qwen3_like
from megalite.checkpoint.convert.families.windows import read_one_window, write_one_window
from megalite.config import ModelConfig

_WIDTH = "moe_intermediate_size"


def _read(hf: HFSettings) -> dict[str, Any]:
    hf.require("qwen3_moe", decoder_sparse_step=1, mlp_only_layers=[], output_router_logits=False)
    fields, window = read_qwen3_like(hf, "qwen3_moe"), hf.get("sliding_window")
    return {
        **fields,
        **read_one_window(window if hf.switch("use_sliding_window", False) else None, fields),
        **read_experts(hf, ("num_local_experts", "num_experts"), _WIDTH),
        "moe_router_pre_softmax": not hf.switch("norm_topk_prob", False),
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_qwen3_like(config),
        **write_one_window(config),
        "use_sliding_window": config.layer_kinds[0].window is not None,
        **write_experts(config, "num_experts", _WIDTH),
        "norm_topk_prob": not config.moe_router_pre_softmax,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


QWEN3_MOE = replace(
    QWEN3,
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    read=_read,
    write=_write,
    layer=(
        *(module for module in QWEN3.layer if ".mlp." not in module.ours),
        *expert_modules("model.layers.{}.mlp", "gate_proj", "up_proj", "down_proj"),
    ),
    experts=FUSED_EXPERTS,
)
