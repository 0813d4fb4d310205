"""Read and write layers with Gated DeltaNet, as Qwen3-Next and Qwen3.5 have them.

Shapes: g query and key heads, r value heads that share one, d size of a query or key head, e of a value head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.convert.families.family import SAME, Module, Parts, Transform
from megalite.checkpoint.convert.families.grouped_rows import join_kinds, split_kinds
from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.checkpoint.convert.families.windows import FULL
from megalite.config import LayerKind, ModelConfig
from megalite.errors import UserError

RECURRENT = "linear_attention"
"""Their name of layers with Gated DeltaNet."""
_SIZES = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


def read_delta_net(hf: HFSettings, num_layers: int) -> dict[str, Any]:
    """Return our fields for the layers with Gated DeltaNet."""
    every, types = hf.get("full_attention_interval", 4), hf.get("layer_types")
    if types is None:
        types = [FULL if (number + 1) % every == 0 else RECURRENT for number in range(num_layers)]
    if len(types) != num_layers or not {*types} <= {RECURRENT, FULL}:
        raise UserError(f"layer_types {types} cannot be converted: {RECURRENT} and {FULL} of each layer can")
    sizes = {name: hf.get(name, usual) for name, usual in _SIZES.items()}
    if RECURRENT not in types:
        return {}
    marks = tuple(int(kind == RECURRENT) for kind in types)
    return {
        "recurrent_mixer": "gated_delta_net",
        "linear_attention_freq": None if all(marks) else marks,
        **sizes,
    }


def write_delta_net(config: ModelConfig) -> dict[str, Any]:
    """Return their settings for the layers with Gated DeltaNet."""
    types = [FULL if kind.mixer == "attention" else RECURRENT for kind in config.layer_kinds]
    return {"layer_types": types, **{name: getattr(config, name) for name in _SIZES}}


def is_recurrent(kind: LayerKind) -> bool:
    """Return whether layers of a kind have Gated DeltaNet."""
    return kind.mixer == "gated_delta_net"


def delta_net_modules(block: str, in_projections: Sequence[str], grouping: Transform) -> tuple[Module, ...]:
    """Return the modules of a layer with Gated DeltaNet.

    Args:
        block: their name of the block, with ``{}`` for the layer.
        in_projections: their names of the projections that are one of ours.
        grouping: converts the rows of these projections.
    """

    def module(kind: Any, ours: str, theirs: Sequence[str], transform: Transform = SAME) -> Module:
        names = tuple(f"{block}.{name}" for name in theirs)
        return Module(kind, f"layers.{{}}.gated_delta_net.{ours}", names, transform, only_in=is_recurrent)

    return (
        module("table", "in_projection", in_projections, grouping),
        module("table", "convolution", ("conv1d",), _CONVOLUTION),
        module("vector", "A_log", ("A_log",)),
        module("vector", "dt_bias", ("dt_bias",)),
        module("table", "norm", ("norm",)),
        module("table", "projection", ("out_proj",)),
    )


def _to_two(full: Tensor, config: ModelConfig) -> Parts:
    return split_kinds(full, config.delta_net.key_heads, _rows_of_two(config))


def _from_two(parts: Parts, config: ModelConfig) -> Tensor:
    return join_kinds(parts, config.delta_net.key_heads, _rows_of_two(config))


def _rows_of_two(config: ModelConfig) -> tuple[int, int]:
    rows = config.delta_net.group_rows
    return sum(rows[:4]), sum(rows[4:])


def _to_four(full: Tensor, config: ModelConfig) -> Parts:
    parts = split_kinds(full, config.delta_net.key_heads, config.delta_net.group_rows)
    return [torch.cat(parts[:3]), *parts[3:]]


def _from_four(parts: Parts, config: ModelConfig) -> Tensor:
    qkv, *others = parts
    parts = [*_split_mixed(qkv, config), *others]
    return join_kinds(parts, config.delta_net.key_heads, config.delta_net.group_rows)


def _split_mixed(qkv: Tensor, config: ModelConfig) -> Parts:
    """Split their rows of the queries, keys and values of all heads."""
    sizes = config.delta_net
    return qkv.split([sizes.key_heads * rows for rows in sizes.group_rows[:3]])


def _ungroup_channels(full: Tensor, config: ModelConfig) -> Parts:
    """Order the channels of a convolution ``[g (2 d + r e), k]`` as queries, keys and values of all heads."""
    parts = split_kinds(full, config.delta_net.key_heads, config.delta_net.group_rows[:3])
    return [torch.cat(parts).unsqueeze(1)]


def _group_channels(parts: Parts, config: ModelConfig) -> Tensor:
    mixed, sizes = _split_mixed(parts[0].squeeze(1), config), config.delta_net
    return join_kinds(mixed, sizes.key_heads, sizes.group_rows[:3])


TWO_PROJECTIONS = Transform(_to_two, _from_two)
FOUR_PROJECTIONS = Transform(_to_four, _from_four)
"""Rows of two projections by key head, and of four: of queries, keys and values, gates, rates, and decays."""
_CONVOLUTION = Transform(_ungroup_channels, _group_channels)
