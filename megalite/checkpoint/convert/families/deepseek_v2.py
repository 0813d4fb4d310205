"""transformers' DeepSeek-V2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megalite.checkpoint.convert.families.deepseek_experts import (
    first_dense_layers,
    read_experts_after,
    write_experts_after,
)
from megalite.checkpoint.convert.families.deepseek_v3 import DEEPSEEK_V3
from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.checkpoint.convert.families.latent_attention import (
    read_latent_attention,
    write_latent_attention,
)
from megalite.config import ModelConfig

_GREEDY, _IN_GROUPS = "greedy", "group_limited_greedy"


def _read(hf: HFSettings) -> dict[str, Any]:
    fields = {**read_latent_attention(hf, "deepseek_v2"), "rotary_interleaved": True}
    first_dense = first_dense_layers(hf, default=0)
    if first_dense >= fields["num_layers"]:
        return fields
    hf.require("deepseek_v2", norm_topk_prob=False, scoring_func="softmax")
    experts = read_experts_after(hf, first_dense, factor=1.0)
    return {**fields, **experts, **_read_groups(hf), "moe_router_pre_softmax": True}


def _read_groups(hf: HFSettings) -> dict[str, Any]:
    """Return our fields for `topk_method`: a token's experts are of all groups, or of those with the best."""
    method, numbers = hf.get("topk_method", _GREEDY), (hf.get("n_group"), hf.get("topk_group"))
    if method == _GREEDY or numbers == (1, 1):
        return {}
    hf.require("deepseek_v2", topk_method=_IN_GROUPS)
    names = "moe_router_num_groups", "moe_router_group_topk", "moe_router_group_scores"
    return dict(zip(names, (*numbers, 1), strict=True))


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_latent_attention(config),
        **write_experts_after(config),
        "topk_method": _GREEDY if config.moe_router_num_groups is None else _IN_GROUPS,
        "norm_topk_prob": False,
    }


DEEPSEEK_V2 = replace(
    DEEPSEEK_V3, model_type="deepseek_v2", architecture="DeepseekV2ForCausalLM", read=_read, write=_write
)
