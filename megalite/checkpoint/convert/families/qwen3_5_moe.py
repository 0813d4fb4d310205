"""transformers' Qwen3.5 for text, with experts in all layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.checkpoint.convert.families.qwen3_5 import QWEN3_5, read_text_rotary
from megalite.checkpoint.convert.families.qwen3_next import read_hybrid, write_hybrid
from megalite.checkpoint.convert.families.sparse_experts import read_gated_experts, write_gated_experts
from megalite.config import ModelConfig

_KIND, _WIDTH = "qwen3_5_moe_text", "moe_intermediate_size"
_FIXED = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
"""Settings of other Qwen, which the family does not have, with what it computes."""


def _read(hf: HFSettings) -> dict[str, Any]:
    hf.require(_KIND, **_FIXED)
    fields = read_hybrid(hf, _KIND, read_text_rotary(hf), width=_WIDTH)
    return {**fields, **read_gated_experts(hf, _KIND, fields["num_layers"], norm_topk_prob=True)}


def _write(config: ModelConfig) -> dict[str, Any]:
    settings = {**write_hybrid(config), _WIDTH: config.expert_ffn_size, **write_gated_experts(config)}
    return {name: value for name, value in settings.items() if name not in _FIXED}


QWEN3_5_MOE = replace(
    QWEN3_5,
    model_type=_KIND,
    architecture="Qwen3_5MoeForCausalLM",
    read=_read,
    write=_write,
    without_effect=("intermediate_size",),
)
