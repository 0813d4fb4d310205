"""transformers' Qwen 2 and Qwen 2.5."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.checkpoint.convert.families.llama import LLAMA, read_llama_like, write_llama_like
from megalite.checkpoint.convert.families.windows import read_windows, write_windows
from megalite.config import ModelConfig


def _read(hf: HFSettings) -> dict[str, Any]:
    hf.require("qwen2", mlp_bias=False)
    fields = read_llama_like(hf, positions=32768)
    return {**fields, **read_windows(hf, fields), "add_qkv_bias": True}


def _write(config: ModelConfig) -> dict[str, Any]:
    return {**write_llama_like(config), **write_windows(config)}


QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    read=_read,
    write=_write,
    without_effect=("use_mrope",),  # of the family's models for images
)
