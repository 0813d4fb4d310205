"""transformers' MiniMax-M2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megalite.checkpoint.convert.families.deepseek_experts import read_biased_scores
from megalite.checkpoint.convert.families.experts import expert_bias, read_experts, write_experts
from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.checkpoint.convert.families.llama import read_llama_like, write_llama_like
from megalite.checkpoint.convert.families.mixtral import MIXTRAL
from megalite.checkpoint.convert.families.qwen3 import QK_NORMS
from megalite.checkpoint.convert.families.rotary import read_rotary
from megalite.checkpoint.convert.model_settings import none_if_default
from megalite.config import ModelConfig

_COUNT, _WIDTH = "num_local_experts", "intermediate_size"
_OF_TRAINING = ("use_mtp", "num_mtp_modules", "mtp_transformer_layers")
"""Settings of modules that the published files do not hold."""


def _read(hf: HFSettings) -> dict[str, Any]:
    hf.require("minimax_m2", router_jitter_noise=0.0, output_router_logits=False)
    hf.require("minimax_m2", use_qk_norm=True, qk_norm_type="per_layer", use_routing_bias=True)
    hf.require("minimax_m2", shared_intermediate_size=0, attn_type_list=[1] * hf["num_hidden_layers"])
    head_dim, rotary_dim = hf.get("head_dim", 128), hf.get("rotary_dim")
    share = hf.get("partial_rotary_factor", 1.0) if rotary_dim is None else rotary_dim / head_dim
    fields = read_llama_like(hf, positions=196608, rotary=read_rotary(hf, 5000000.0, share=share))
    experts = read_experts(hf, (_COUNT, "num_experts"), _WIDTH)
    usual = fields["hidden_size"] // fields["num_attention_heads"]
    return {
        **fields,
        **experts,
        **read_biased_scores(hf, "minimax_m2", experts["moe_router_topk"]),
        "kv_channels": none_if_default(head_dim, usual),
        "qk_layernorm": True,
        "qk_layernorm_width": "all_heads",
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_llama_like(config),
        **write_experts(config, _COUNT, _WIDTH),
        "head_dim": config.head_dim,
        "rotary_dim": config.rotary_dim,
    }


MINIMAX_M2 = replace(
    MIXTRAL,
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    read=_read,
    write=_write,
    layer=(
        *MIXTRAL.layer,
        *QK_NORMS,
        expert_bias("model.layers.{}.block_sparse_moe.e_score_correction_bias"),
    ),
    without_effect=_OF_TRAINING,
    mtp=(),  # its files have other names for these modules
)
