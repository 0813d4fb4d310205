"""Read and write which layers have a sliding window, as Qwen and SmolLM describe it."""

from __future__ import annotations

from typing import Any

from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.config import ModelConfig
from megalite.errors import UserError

_WINDOW, _FULL = "sliding_attention", "full_attention"


def read_windows(hf: HFSettings, fields: dict[str, Any]) -> dict[str, Any]:
    """Return our fields for the windows.

    Args:
        fields: our other fields; the number of layers and the sequence length are read.
    """
    num_layers, size = fields["num_layers"], hf.get("sliding_window")
    types, first = hf.get("layer_types"), hf.get("max_window_layers", 0)
    if not hf.switch("use_sliding_window", False) or size is None or size >= fields["seq_length"]:
        return {}
    marks = [number >= first for number in range(num_layers)]
    if types is not None:
        if len(types) != num_layers or not {*types} <= {_WINDOW, _FULL}:
            raise UserError(
                f"layer_types {types} cannot be converted: {_WINDOW} and {_FULL} of each layer can"
            )
        marks = [kind == _WINDOW for kind in types]
    if not any(marks):
        return {}
    window = {"window_size": (size - 1, 0)}  # theirs counts the token itself
    return window if all(marks) else {**window, "window_attn_skip_freq": tuple(map(int, marks))}


def write_windows(config: ModelConfig) -> dict[str, Any]:
    """Return transformers' settings for the windows."""
    marks = [kind.window is not None for kind in config.layer_kinds]
    return {
        "use_sliding_window": any(marks),
        "sliding_window": None if config.window_size is None else config.window_size[0] + 1,
        "max_window_layers": marks.index(True) if any(marks) else config.num_layers,
        "layer_types": [_WINDOW if mark else _FULL for mark in marks],
    }
