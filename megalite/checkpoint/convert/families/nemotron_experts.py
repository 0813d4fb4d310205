"""Read and write the experts of Nemotron-H: MLPs without gates, which may compute with latents of tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megalite.checkpoint.convert.families.deepseek_experts import read_biased_scores
from megalite.checkpoint.convert.families.experts import SEPARATE, has_experts
from megalite.checkpoint.convert.families.family import Module
from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.config import ModelConfig

SETTINGS = (
    *("n_routed_experts", "num_local_experts", "n_shared_experts", "num_experts_per_tok", "norm_topk_prob"),
    *("moe_intermediate_size", "moe_shared_expert_intermediate_size", "moe_latent_size", "n_group"),
    *("topk_group", "routed_scaling_factor"),
)
"""Settings of experts, without effect in a model that has none."""


def read_nemotron_experts(hf: HFSettings) -> dict[str, Any]:
    """Return our fields for the layers with experts."""
    hf.require("nemotron_h", output_router_logits=False, n_shared_experts=1)
    return {
        **read_biased_scores(hf, "nemotron_h", hf["num_experts_per_tok"]),
        "num_experts": hf.first("n_routed_experts", "num_local_experts"),
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_latent_size": hf.get("moe_latent_size"),
        "moe_shared_expert_intermediate_size": hf["moe_shared_expert_intermediate_size"],
        "moe_router_topk_scaling_factor": float(hf.get("routed_scaling_factor", 1.0)),
        "moe_router_load_balancing_type": "none",
    }


def write_nemotron_experts(config: ModelConfig) -> dict[str, Any]:
    """Return their settings for our experts."""
    return {
        "n_routed_experts": config.num_experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": config.moe_router_topk,
        "norm_topk_prob": True,
        "moe_intermediate_size": config.expert_ffn_size,
        "moe_latent_size": config.moe_latent_size,
        "moe_shared_expert_intermediate_size": config.moe_shared_expert_intermediate_size or 0,
        "n_group": config.moe_router_num_groups or 1,
        "topk_group": config.moe_router_group_topk or 1,
        "routed_scaling_factor": config.moe_router_topk_scaling_factor,
    }


def _has_latents(config: ModelConfig) -> bool:
    return config.moe_latent_size is not None


def nemotron_expert_modules(block: str) -> tuple[Module, ...]:
    """Return the modules of a layer with experts.

    Args:
        block: their name of the block, with ``{}`` for the layer.
    """

    def module(kind: Any, ours: str, theirs: str) -> Module:
        return Module(kind, f"layers.{{}}.mlp.{ours}", (f"{block}.{theirs}",), only_in=has_experts)

    return (
        module("table", "router", "gate"),
        module("vector", "router.expert_bias", "gate.e_score_correction_bias"),
        *(
            replace(module("table", ours, f"experts.{{expert}}.{ours}_proj"), transform=SEPARATE)
            for ours in ("up", "down")
        ),
        module("linear", "shared.up", "shared_experts.up_proj"),
        module("linear", "shared.down", "shared_experts.down_proj"),
        replace(module("table", "to_latent", "fc1_latent_proj"), only_if=_has_latents),
        replace(module("table", "from_latent", "fc2_latent_proj"), only_if=_has_latents),
    )
