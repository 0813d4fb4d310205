"""transformers' DeepSeek-V3."""

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
from megalite.checkpoint.convert.families.latent_attention import (
    LATENT_ATTENTION,
    read_latent_attention,
    write_latent_attention,
)
from megalite.checkpoint.convert.families.llama import LLAMA
from megalite.config import ModelConfig

_OF_TRAINING = ("ep_size", "seq_aux", "output_router_logits", "router_aux_loss_coef")


def _read(hf: HFSettings) -> dict[str, Any]:
    fields = read_latent_attention(hf, "deepseek_v3")
    fields["rotary_interleaved"] = hf.switch("rope_interleave", True)
    first_dense = first_dense_layers(hf, default=3)
    if first_dense >= fields["num_layers"]:
        return fields
    hf.require("deepseek_v3", topk_method="noaux_tc")
    experts = read_experts_after(hf, first_dense, factor=2.5)
    scores = read_biased_scores(hf, "deepseek_v3", experts["moe_router_topk"], groups=8, group_topk=4)
    return {**fields, **experts, **scores}


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_latent_attention(config),
        **write_experts_after(config),
        "rope_interleave": config.rotary_interleaved,
    }


DEEPSEEK_V3 = replace(
    LLAMA,
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    read=_read,
    write=_write,
    layer=(
        *modules_with_some_experts((module for module in LLAMA.layer if module.kind != "qkv"), EXPERTS),
        *LATENT_ATTENTION,
    ),
    without_effect=(*_OF_TRAINING, "qk_head_dim"),  # the last is a sum of sizes
    experts=FUSED_EXPERTS,
)
