"""Read and write layers with Gated DeltaNet, as Qwen3-Next and Qwen3.5 have them.

Shapes: g query and key heads, r value heads that share one, d size of a query or key head, e of a value head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megalite.checkpoint.convert.families.family import SAME, Module, Transform, by_kind, with_kernel_dim
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


def _groups_of_two(config: ModelConfig) -> tuple[int, Sequence[int]]:
    rows = config.delta_net.group_rows
    return config.delta_net.key_heads, (sum(rows[:4]), sum(rows[4:]))


def _by_kind(num_kinds: int, apart: int = 0) -> Transform:
    """Return the transform of the first kinds of rows in a group; see `by_kind`."""
    return by_kind(
        lambda config: (config.delta_net.key_heads, config.delta_net.group_rows[:num_kinds]), apart
    )


TWO_PROJECTIONS = by_kind(_groups_of_two, apart=1)
FOUR_PROJECTIONS = _by_kind(6, apart=3)
"""Rows of two projections by key head, and of four: of queries, keys and values, gates, rates, and decays."""
_CONVOLUTION = with_kernel_dim(_by_kind(3))
