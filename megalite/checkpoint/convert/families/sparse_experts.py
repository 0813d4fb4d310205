"""Read and write the experts of Qwen, which some layers may not have, and its shared expert with a gate."""

from __future__ import annotations

from typing import Any

from megalite.checkpoint.convert.families.experts import (
    expert_modules,
    read_experts,
    shared_expert_modules,
    write_experts,
)
from megalite.checkpoint.convert.families.family import Module
from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.config import ModelConfig

_WIDTH, _SHARED_WIDTH = "moe_intermediate_size", "shared_expert_intermediate_size"
_SETTINGS = (
    *(_WIDTH, _SHARED_WIDTH, "num_experts_per_tok", "norm_topk_prob"),
    *("output_router_logits", "router_aux_loss_coef"),
)
"""Settings of experts, without effect in a dense model."""


def read_sparse_experts(
    hf: HFSettings, kind: str, num_layers: int, norm_topk_prob: bool = False
) -> dict[str, Any]:
    """Return our fields for the experts; none for a model whose layers are all dense.

    Args:
        kind: name of the family, for messages.
        norm_topk_prob: default of their setting of this name.
    """
    step, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or ()
    count = hf.first("num_local_experts", "num_experts")
    marks = tuple(
        int(count > 0 and (number + 1) % step == 0 and number not in dense) for number in range(num_layers)
    )
    if not any(marks):
        hf.names_read.update(_SETTINGS)
        return {}
    hf.require(kind, output_router_logits=False)
    return {
        **read_experts(hf, ("num_local_experts", "num_experts"), _WIDTH),
        "moe_layer_freq": None if all(marks) else marks,
        "moe_router_pre_softmax": not hf.switch("norm_topk_prob", norm_topk_prob),
    }


def write_sparse_experts(config: ModelConfig) -> dict[str, Any]:
    """Return their settings for our experts; those of a dense model are no experts."""
    if not config.has_experts:
        return {"num_experts": 0, "mlp_only_layers": [], "decoder_sparse_step": 1}
    dense = [number for number, kind in enumerate(config.layer_kinds) if not kind.has_experts]
    return {
        **write_experts(config, "num_experts", _WIDTH),
        "norm_topk_prob": not config.moe_router_pre_softmax,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
    }


def read_gated_experts(
    hf: HFSettings, kind: str, num_layers: int, norm_topk_prob: bool = False
) -> dict[str, Any]:
    """Return our fields for experts beside a shared one with a gate; see `read_sparse_experts`."""
    experts = read_sparse_experts(hf, kind, num_layers, norm_topk_prob)
    if not experts:
        return {}
    return {
        **experts,
        "moe_shared_expert_intermediate_size": hf[_SHARED_WIDTH],
        "moe_shared_expert_gate": True,
    }


def write_gated_experts(config: ModelConfig) -> dict[str, Any]:
    """Return their settings for our experts beside a shared one with a gate."""
    width = config.moe_shared_expert_intermediate_size
    return {**write_sparse_experts(config), **({_SHARED_WIDTH: width or 0} if config.has_experts else {})}


_MLP = "model.layers.{}.mlp"
EXPERTS = expert_modules(_MLP, "gate_proj", "up_proj", "down_proj")
GATED_EXPERTS = (
    *EXPERTS,
    *shared_expert_modules(_MLP + ".shared_expert"),
    Module("table", "layers.{}.mlp.shared.gate", (_MLP + ".shared_expert_gate",)),
)
"""Modules of a layer with experts, without and with a shared one."""
