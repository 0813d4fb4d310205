"""transformers' Mistral."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.checkpoint.convert.families.llama import LLAMA, read_llama_like, write_llama_like
from megalite.checkpoint.convert.families.windows import read_one_window, write_one_window
from megalite.config import ModelConfig


def _read(hf: HFSettings) -> dict[str, Any]:
    hf.require("mistral", attention_bias=False, mlp_bias=False)
    fields = read_llama_like(hf, positions=131072)
    return {**fields, **read_one_window(hf.get("sliding_window", 4096), fields)}


def _write(config: ModelConfig) -> dict[str, Any]:
    return {**write_llama_like(config), **write_one_window(config), "head_dim": config.head_dim}


MISTRAL = replace(LLAMA, model_type="mistral", architecture="MistralForCausalLM", read=_read, write=_write)
