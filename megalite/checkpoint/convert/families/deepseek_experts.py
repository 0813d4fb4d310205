"""Read and write the experts of DeepSeek-V2, V3 and GLM-4.5, which the first layers do not have."""

from __future__ import annotations

from typing import Any

from megalite.checkpoint.convert.families.experts import expert_bias, expert_modules, shared_expert_modules
from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.config import ModelConfig
from megalite.errors import UserError

_SETTINGS = (
    *("n_routed_experts", "num_local_experts", "num_experts", "n_shared_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "n_group", "topk_group", "topk_method", "norm_topk_prob"),
    *("routed_scaling_factor", "scoring_func", "aux_loss_alpha", "moe_layer_freq"),
)
"""Settings of experts, without effect in a dense model."""


def first_dense_layers(hf: HFSettings, default: int) -> int:
    """Return the number of layers before the first one with experts; without any, all settings are read."""
    count = hf.get("first_k_dense_replace", default)
    if count >= hf["num_hidden_layers"]:
        hf.names_read.update(_SETTINGS)
    return int(count)


def read_experts_after(hf: HFSettings, first_dense: int, factor: float) -> dict[str, Any]:
    """Return our fields for the settings of experts that all of these models share.

    Args:
        first_dense: number of layers before the first one with experts.
        factor: default of `routed_scaling_factor`.
    """
    hf.require("deepseek", moe_layer_freq=1)
    layers, width = hf["num_hidden_layers"], hf["moe_intermediate_size"]
    return {
        "num_experts": hf.first("n_routed_experts", "num_local_experts", "num_experts"),
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": width * hf["n_shared_experts"],
        "moe_layer_freq": (0,) * first_dense + (1,) * (layers - first_dense) if first_dense else None,
        "moe_router_topk_scaling_factor": float(hf.get("routed_scaling_factor", factor)),
        "moe_aux_loss_coeff": float(hf.get("aux_loss_alpha", 0.0)),
    }


def read_biased_scores(
    hf: HFSettings, kind: str, topk: int, groups: int = 1, group_topk: int = 1
) -> dict[str, Any]:
    """Return our fields for sigmoid scores with a bias that selects experts, in groups.

    Args:
        kind: name of the family, for messages.
        topk: number of experts for each token.
        groups, group_topk: defaults of `n_group` and `topk_group`.
    """
    hf.require(kind, scoring_func="sigmoid", norm_topk_prob=True)
    if topk == 1:
        raise UserError(f"{kind} with num_experts_per_tok 1, whose weight is its score here and 1 there")
    numbers = hf.get("n_group", groups), hf.get("topk_group", group_topk)
    groups_and_topk = (None, None) if numbers == (1, 1) else numbers
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        **dict(zip(("moe_router_num_groups", "moe_router_group_topk"), groups_and_topk, strict=True)),
    }


def write_experts_after(config: ModelConfig) -> dict[str, Any]:
    """Return the settings of experts that all of these models share; none of a dense model."""
    dense = [not kind.has_experts for kind in config.layer_kinds]
    if all(dense):
        return {"first_k_dense_replace": config.num_layers}
    return {
        "first_k_dense_replace": dense.index(False),
        "n_routed_experts": config.num_experts,
        "num_experts_per_tok": config.moe_router_topk,
        "moe_intermediate_size": config.expert_ffn_size,
        "n_shared_experts": (config.moe_shared_expert_intermediate_size or 0) // config.expert_ffn_size,
        "n_group": config.moe_router_num_groups or 1,
        "topk_group": config.moe_router_group_topk or 1,
        "routed_scaling_factor": config.moe_router_topk_scaling_factor,
        "aux_loss_alpha": config.moe_aux_loss_coeff,
    }


_MLP = "model.layers.{}.mlp"
EXPERTS = (
    *expert_modules(_MLP, "gate_proj", "up_proj", "down_proj"),
    *shared_expert_modules(_MLP + ".shared_experts"),
    expert_bias(_MLP + ".gate.e_score_correction_bias"),
)
"""Modules of a layer with experts."""
