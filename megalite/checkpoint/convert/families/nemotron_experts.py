"""Read and write the experts of Nemotron-H: MLPs without gates, which may compute with latents of tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megalite.checkpoint.convert.families.experts import SEPARATE
from megalite.checkpoint.convert.families.family import Module
from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.config import LayerKind, ModelConfig
from megalite.errors import UserError

SETTINGS = (
    *("n_routed_experts", "num_local_experts", "n_shared_experts", "num_experts_per_tok", "norm_topk_prob"),
    *("moe_intermediate_size", "moe_shared_expert_intermediate_size", "moe_latent_size", "n_group"),
    *("topk_group", "routed_scaling_factor"),
)
"""Settings of experts, without effect in a model that has none."""


def read_nemotron_experts(hf: HFSettings) -> dict[str, Any]:
    """Return our fields for the layers with experts."""
    hf.require("nemotron_h", norm_topk_prob=True, output_router_logits=False, n_shared_experts=1)
    if hf["num_experts_per_tok"] == 1:
        raise UserError("nemotron_h with num_experts_per_tok 1, whose weight is its score here and 1 there")
    groups, selected = hf.get("n_group", 1), hf.get("topk_group", 1)
    has_groups = (groups, selected) != (1, 1)
    return {
        "num_experts": hf.first("n_routed_experts", "num_local_experts"),
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_latent_size": hf.get("moe_latent_size"),
        "moe_shared_expert_intermediate_size": hf["moe_shared_expert_intermediate_size"],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": groups if has_groups else None,
        "moe_router_group_topk": selected if has_groups else None,
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


def _has_experts(kind: LayerKind) -> bool:
    return kind.has_experts


def _has_latents(config: ModelConfig) -> bool:
    return config.moe_latent_size is not None


def nemotron_expert_modules(block: str) -> tuple[Module, ...]:
    """Return the modules of a layer with experts.

    Args:
        block: their name of the block, with ``{}`` for the layer.
    """

    def module(kind: Any, ours: str, theirs: str) -> Module:
        return Module(kind, f"layers.{{}}.mlp.{ours}", (f"{block}.{theirs}",), only_in=_has_experts)

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
