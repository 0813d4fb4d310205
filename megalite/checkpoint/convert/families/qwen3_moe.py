"""transformers' Qwen 3 with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megalite.checkpoint.convert.families.experts import FUSED_EXPERTS, modules_with_some_experts
from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.checkpoint.convert.families.qwen3 import QWEN3, read_qwen3_like, write_qwen3_like
from megalite.checkpoint.convert.families.sparse_experts import (
    EXPERTS,
    read_sparse_experts,
    write_sparse_experts,
)
from megalite.checkpoint.convert.families.windows import read_one_window, write_one_window
from megalite.config import ModelConfig


def _read(hf: HFSettings) -> dict[str, Any]:
    fields, window = read_qwen3_like(hf, "qwen3_moe"), hf.get("sliding_window")
    return {
        **fields,
        **read_one_window(window if hf.switch("use_sliding_window", False) else None, fields),
        **read_sparse_experts(hf, "qwen3_moe", fields["num_layers"]),
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_qwen3_like(config),
        **write_one_window(config),
        "use_sliding_window": config.layer_kinds[0].window is not None,
        **write_sparse_experts(config),
    }


QWEN3_MOE = replace(
    QWEN3,
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    read=_read,
    write=_write,
    layer=modules_with_some_experts(QWEN3.layer, EXPERTS),
    experts=FUSED_EXPERTS,
)
