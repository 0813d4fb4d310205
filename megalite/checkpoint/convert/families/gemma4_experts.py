"""Read and write Gemma 4's experts beside MLPs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megalite.checkpoint.convert.families.family import SAME, Module, Parts, Transform
from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.config import ModelConfig


def read_gemma4_experts(hf: HFSettings) -> dict[str, Any]:
    """Return our fields for experts beside the MLPs."""
    count, topk, width = (hf.get(name) for name in ("num_experts", "top_k_experts", "moe_intermediate_size"))
    if not hf.switch("enable_moe_block", False):
        return {}
    return {
        "moe_beside_mlp": True,
        "num_experts": count,
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": width,
        "moe_router_load_balancing_type": "none",
    }


def write_gemma4_experts(config: ModelConfig) -> dict[str, Any]:
    """Return their settings for our experts."""
    return {
        "enable_moe_block": True,
        "num_experts": config.num_experts,
        "top_k_experts": config.moe_router_topk,
        "moe_intermediate_size": config.expert_ffn_size,
    }


def _split_halves(full: Tensor, _: ModelConfig) -> Parts:
    """Return ``[e, 2, ffn, h]`` as ``[e, 2 ffn, h]``."""
    return [full.flatten(1, 2)]


def _join_halves(parts: Parts, _: ModelConfig) -> Tensor:
    return parts[0].unflatten(1, (2, -1))


def _of_experts(kind: Any, ours: str, theirs: str, transform: Transform = SAME) -> Module:
    names = (f"model.layers.{{}}.{theirs}",)
    return Module(kind, f"layers.{{}}.{ours}", names, transform, only_in=lambda kind: kind.has_experts)


EXPERTS = (
    _of_experts("table", "experts.router", "router.proj"),
    _of_experts("vector", "experts.router.scale", "router.scale"),
    _of_experts("vector", "experts.router.expert_scale", "router.per_expert_scale"),
    _of_experts(
        "vector", "experts.up.weight", "experts.gate_up_proj", Transform(_split_halves, _join_halves)
    ),
    _of_experts("vector", "experts.down.weight", "experts.down_proj"),
    _of_experts("norm", "experts.input_norm", "pre_feedforward_layernorm_2"),
    _of_experts("norm", "experts.output_norm", "post_feedforward_layernorm_2"),
    _of_experts("norm", "mlp_own_norm", "post_feedforward_layernorm_1"),
)
"""Modules of a layer with experts, besides those of every layer."""
