"""transformers' DeepSeek-V3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megalite.checkpoint.convert.families.deepseek_experts import (
    EXPERTS,
    first_dense_layers,
    only_dense,
    read_experts_after,
    write_experts_after,
)
from megalite.checkpoint.convert.families.experts import FUSED_EXPERTS
from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.checkpoint.convert.families.latent_attention import (
    LATENT_ATTENTION,
    read_latent_attention,
    write_latent_attention,
)
from megalite.checkpoint.convert.families.llama import LLAMA
from megalite.config import ModelConfig
from megalite.errors import UserError

_OF_TRAINING = ("ep_size", "seq_aux", "output_router_logits", "router_aux_loss_coef")


def _read(hf: HFSettings) -> dict[str, Any]:
    fields = read_latent_attention(hf, "deepseek_v3")
    fields["rotary_interleaved"] = hf.switch("rope_interleave", True)
    first_dense = first_dense_layers(hf, default=3)
    if first_dense >= fields["num_layers"]:
        return fields
    hf.require("deepseek_v3", topk_method="noaux_tc", norm_topk_prob=True, scoring_func="sigmoid")
    groups, selected = hf.get("n_group", 8), hf.get("topk_group", 4)
    has_groups = (groups, selected) != (1, 1)
    experts = read_experts_after(hf, first_dense, factor=2.5)
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


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_latent_attention(config),
        **write_experts_after(config),
        "n_group": config.moe_router_num_groups or 1,
        "topk_group": config.moe_router_group_topk or 1,
        "rope_interleave": config.rotary_interleaved,
    }


DEEPSEEK_V3 = replace(
    LLAMA,
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    read=_read,
    write=_write,
    layer=(
        *(only_dense(module) for module in LLAMA.layer if module.kind != "qkv"),
        *LATENT_ATTENTION,
        *EXPERTS,
    ),
    without_effect=(*_OF_TRAINING, "qk_head_dim"),  # the last is a sum of sizes
    experts=FUSED_EXPERTS,
)
