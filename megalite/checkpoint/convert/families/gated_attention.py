"""The modules of attention with a gate, as Qwen3-Next and Qwen3.5 have it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megalite.checkpoint.convert.families.family import Parts, Transform
from megalite.checkpoint.convert.families.qwen3 import QWEN3
from megalite.config import LayerKind, ModelConfig


def _split_gated_qkv(qkv: Tensor, config: ModelConfig) -> Parts:
    """Split our rows into queries with their gates, head by head, keys and values."""
    grouped = qkv.unflatten(0, (config.num_kv_heads, -1, config.head_dim))
    queries, gates, keys, values = grouped.split(config.group_heads(LayerKind()), dim=1)
    return [torch.stack((queries, gates), dim=2).flatten(0, 3), keys.flatten(0, 2), values.flatten(0, 2)]


def _join_gated_qkv(parts: Parts, config: ModelConfig) -> Tensor:
    q, k, v = (part.unflatten(0, (config.num_kv_heads, -1, config.head_dim)) for part in parts)
    queries, gates = q.unflatten(1, (-1, 2)).unbind(2)
    return torch.cat((queries, gates, k, v), dim=1).flatten(0, 2)


_GATED_QKV = Transform(_split_gated_qkv, _join_gated_qkv)
GATED_ATTENTION = tuple(
    replace(
        module,
        transform=_GATED_QKV if module.kind == "qkv" else module.transform,
        only_in=lambda kind: kind.mixer == "attention",
    )
    for module in QWEN3.layer
    if ".attention." in module.ours
)
"""Modules of a layer with attention."""
