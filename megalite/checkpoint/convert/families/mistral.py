"""transformers' Mistral."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.checkpoint.convert.families.llama import LLAMA, read_llama_like, write_llama_like
from megalite.config import ModelConfig


def _read(hf: HFSettings) -> dict[str, Any]:
    hf.require("mistral", attention_bias=False, mlp_bias=False)
    fields = read_llama_like(hf, positions=131072)
    window = hf.get("sliding_window", 4096)  # it counts the token itself
    if window is None or window >= fields["seq_length"]:
        return fields
    return {**fields, "window_size": (window - 1, 0)}


def _write(config: ModelConfig) -> dict[str, Any]:
    window = config.layer_kinds[0].window
    return {
        **write_llama_like(config),
        "head_dim": config.head_dim,
        "sliding_window": None if window is None else window + 1,
    }


MISTRAL = replace(LLAMA, model_type="mistral", architecture="MistralForCausalLM", read=_read, write=_write)
