"""Read and write Gemma 4's attention, whose heads differ between kinds of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megalite.checkpoint.convert.families.family import Module, by_kind, qkv_groups
from megalite.checkpoint.convert.families.gemma2 import GEMMA2
from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.checkpoint.convert.families.windows import FULL
from megalite.checkpoint.convert.model_settings import none_if_default
from megalite.config import ModelConfig
from megalite.errors import UserError


def read_heads(hf: HFSettings, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return our fields of attention heads; `per_layer_config` has the sizes of layers that differ."""
    head_dim, as_values = hf.get("head_dim", 256), hf.switch("attention_k_eq_v", False)
    own = {"head_dim": hf.get("global_head_dim", 512)}
    if as_values and hf.get("num_global_key_value_heads") is not None:
        own["num_key_value_heads"] = hf["num_global_key_value_heads"]
    by_layer, types = hf.get("per_layer_config"), hf.get("layer_types")
    if by_layer is not None and types is not None:
        full = {number for number, kind in enumerate(types) if kind == FULL}
        own = next(iter(by_layer.values()), {})
        if any(each != own for each in by_layer.values()) or {*map(int, by_layer)} not in (full, set()):
            raise UserError(
                f"gemma4_text with other sizes than one for all layers of {FULL} cannot be converted"
            )
    groups = own.get("num_key_value_heads")
    return {
        "kv_channels": none_if_default(head_dim, sizes["hidden_size"] // sizes["num_attention_heads"]),
        "full_attention_kv_channels": own.get("head_dim"),
        "full_attention_query_groups": groups,
        "keys_as_values": "full_attention" if as_values else "none",
    }


def _query_key_groups(config: ModelConfig) -> tuple[int, Sequence[int]]:
    groups, rows = qkv_groups(config)
    return groups, rows[:2]


_ATTENTION, _OURS = "model.layers.{}.self_attn.", "layers.{}.attention."
_Q, _K = (_ATTENTION + "q_proj",), (_ATTENTION + "k_proj",)
ATTENTION = (
    *(
        replace(module, only_in=lambda kind: kind.key_source is None and not kind.keys_as_values)
        for module in GEMMA2.layer
        if module.kind == "qkv"
    ),
    Module(
        "qkv",
        _OURS + "qkv",
        _Q + _K,
        by_kind(_query_key_groups, apart=1),
        only_in=lambda kind: kind.keys_as_values,
    ),
    Module("qkv", _OURS + "qkv", _Q, only_in=lambda kind: kind.key_source is not None),
    Module("norm", _OURS + "query_norm", (_ATTENTION + "q_norm",)),
    Module(
        "norm",
        _OURS + "key_norm",
        (_ATTENTION + "k_norm",),
        only_in=lambda kind: kind.key_source is None,
    ),
)
"""Modules of a layer's queries, keys and values."""
