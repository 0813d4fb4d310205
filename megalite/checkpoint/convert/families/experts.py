"""Read and write mixtures of experts, whose matrices are separate tensors in transformers' files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.convert.families.family import HALVES, Module, Parts, Transform
from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.config import LayerKind, ModelConfig

FUSED_EXPERTS = {"experts.gate_up_proj": ("gate_proj", "up_proj"), "experts.down_proj": ("down_proj",)}
"""See `Family.experts`."""


def read_experts(hf: HFSettings, count: tuple[str, ...], width: str) -> dict[str, Any]:
    """Return our fields for the experts.

    Args:
        count: their names for the number of experts.
        width: their name for the width of one.
    """
    return {
        "num_experts": hf.first(*count),
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_ffn_hidden_size": hf[width],
        "moe_aux_loss_coeff": hf.get("router_aux_loss_coef", 0.001),
    }


def write_experts(config: ModelConfig, count: str, width: str) -> dict[str, Any]:
    """Return their settings for our experts; see `read_experts`."""
    return {
        count: config.num_experts or 1,  # another number than a dense model has
        "num_experts_per_tok": config.moe_router_topk,
        width: config.expert_ffn_size,
        "router_aux_loss_coef": config.moe_aux_loss_coeff,
    }


def expert_modules(block: str, gate: str, up: str, down: str) -> tuple[Module, ...]:
    """Return the modules of a layer's experts.

    Args:
        block: their name of the block, with ``{}`` for the layer.
        gate, up, down: their names of an expert's matrices.
    """
    halves = tuple(f"{block}.experts.{{expert}}.{name}" for name in (gate, up))
    return (
        Module("table", "layers.{}.mlp.router", (f"{block}.gate",)),
        Module("table", "layers.{}.mlp.up", halves, _HALVES),
        Module("table", "layers.{}.mlp.down", (f"{block}.experts.{{expert}}.{down}",), SEPARATE),
    )


def shared_expert_modules(block: str) -> tuple[Module, ...]:
    """Return the modules of a layer's shared expert without its gate; `block` is their name of it."""
    halves = tuple(f"{block}.{part}_proj" for part in ("gate", "up"))
    return (
        Module("linear", "layers.{}.mlp.shared.up", halves, HALVES),
        Module("linear", "layers.{}.mlp.shared.down", (f"{block}.down_proj",)),
    )


def expert_bias(name: str) -> Module:
    """Return the bias of the scores of a layer's experts; `name` is their name of it."""
    return Module(
        "vector",
        "layers.{}.mlp.router.expert_bias",
        (name,),
        only_if=lambda config: config.moe_router_enable_expert_bias,
    )


def modules_with_some_experts(dense: Iterable[Module], of_experts: Iterable[Module]) -> tuple[Module, ...]:
    """Return the modules of the layers of a model of which some may have experts.

    Args:
        dense: modules of a layer without experts.
        of_experts: modules that a layer with experts has in the place of an MLP.
    """
    return (
        *(replace(each, only_in=_has_mlp) if ".mlp." in each.ours else each for each in dense),
        *(replace(each, only_in=has_experts) for each in of_experts),
    )


def has_experts(kind: LayerKind) -> bool:
    """Return whether a layer has experts."""
    return kind.has_experts


def _has_mlp(kind: LayerKind) -> bool:
    return not kind.has_experts


def _split_halves(full: Tensor, _: ModelConfig) -> Parts:
    """Split ``[e, 2, ffn, h]`` into gate and up of each expert, each ``[ffn, h]``."""
    return full.flatten(0, 1).unbind(0)


def _join_halves(parts: Parts, _: ModelConfig) -> Tensor:
    return torch.stack(tuple(parts)).unflatten(0, (-1, 2))


_HALVES = Transform(_split_halves, _join_halves)
SEPARATE = Transform(lambda full, _: full.unbind(0), lambda parts, _: torch.stack(tuple(parts)))
"""Converts a matrix of each expert."""
