"""Read and write which layers have a sliding window."""

from __future__ import annotations

from typing import Any

from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.config import ModelConfig
from megalite.errors import UserError

WINDOW, FULL = "sliding_attention", "full_attention"
"""Their names of layers with and without a window."""


def read_windows(hf: HFSettings, fields: dict[str, Any]) -> dict[str, Any]:
    """Return our fields for the windows, as Qwen and SmolLM describe them.

    Args:
        fields: our other fields; the number of layers and the sequence length are read.
    """
    num_layers, size = fields["num_layers"], hf.get("sliding_window")
    first = hf.get("max_window_layers", 0)
    marks = _marks_of(hf, [number >= first for number in range(num_layers)])
    if not hf.switch("use_sliding_window", False) or size is None or size >= fields["seq_length"]:
        return {}
    return _fields_of(size, marks)


def read_one_window(size: int | None, fields: dict[str, Any]) -> dict[str, Any]:
    """Return our fields for a window in all layers, as Mistral's; its size counts the token itself."""
    return {} if size is None or size >= fields["seq_length"] else {"window_size": (size - 1, 0)}


def write_one_window(config: ModelConfig) -> dict[str, Any]:
    """Return their setting for a window in all layers."""
    window = config.layer_kinds[0].window
    return {"sliding_window": None if window is None else window + 1}


def read_layer_types(hf: HFSettings, fields: dict[str, Any], full_every: int) -> dict[str, Any]:
    """Return our fields for the windows, as Gemma and OLMo 3 describe them.

    Args:
        fields: our other fields. Layers with a window may have other rotary positions or sizes: they then
            keep a window that is as long as the samples.
        full_every: every Nth layer has no window, if the config does not list the layers.
    """
    size = hf.get("sliding_window", 4096)
    marks = _marks_of(hf, [(number + 1) % full_every != 0 for number in range(fields["num_layers"])])
    if size is None or (size >= fields["seq_length"] and not ModelConfig(**fields).windows_differ):
        return {}
    return _fields_of(size, marks)


def _marks_of(hf: HFSettings, usual: list[bool]) -> list[bool]:
    """Return whether each layer has a window, by default as usual in the family."""
    types = hf.get("layer_types")
    if types is None:
        return usual
    if len(types) != len(usual) or not {*types} <= {WINDOW, FULL}:
        raise UserError(f"layer_types {types} cannot be converted: {WINDOW} and {FULL} of each layer can")
    return [kind == WINDOW for kind in types]


def _fields_of(size: int, marks: list[bool]) -> dict[str, Any]:
    if not any(marks):
        return {}
    window = {"window_size": (size - 1, 0)}  # theirs counts the token itself
    return window if all(marks) else {**window, "window_attn_skip_freq": tuple(map(int, marks))}


def write_windows(config: ModelConfig) -> dict[str, Any]:
    """Return the settings of Qwen and SmolLM for the windows."""
    marks = [kind.window is not None for kind in config.layer_kinds]
    return {
        **write_layer_types(config),
        **({} if any(marks) else {"sliding_window": None}),
        "use_sliding_window": any(marks),
        "max_window_layers": marks.index(True) if any(marks) else config.num_layers,
    }


def write_layer_types(config: ModelConfig) -> dict[str, Any]:
    """Return the settings of Gemma and OLMo 3 for the windows, with a size even if no layer has one."""
    size = config.num_positions if config.window_size is None else config.window_size[0] + 1
    return {
        "sliding_window": size,
        "layer_types": [FULL if kind.window is None else WINDOW for kind in config.layer_kinds],
    }
