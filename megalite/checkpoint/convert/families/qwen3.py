"""transformers' dense Qwen 3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megalite.checkpoint.convert.families.biases import read_biases, write_biases
from megalite.checkpoint.convert.families.family import Module
from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.checkpoint.convert.families.llama import LLAMA, read_llama_like, write_llama_like
from megalite.checkpoint.convert.families.windows import read_windows, write_windows
from megalite.checkpoint.convert.model_settings import none_if_default
from megalite.config import ModelConfig


def _read(hf: HFSettings) -> dict[str, Any]:
    fields = read_qwen3_like(hf, "qwen3")
    return {**fields, **read_windows(hf, fields)}


def read_qwen3_like(hf: HFSettings, kind: str) -> dict[str, Any]:
    """Return our fields for the settings that all Qwen 3 share; `kind` is the family's name for messages."""
    hf.require(kind, mlp_bias=False)
    fields = read_llama_like(hf, positions=32768)
    usual = fields["hidden_size"] // fields["num_attention_heads"]
    return {
        **fields,
        **read_biases(hf),
        "kv_channels": none_if_default(hf.get("head_dim", 128), usual),
        "qk_layernorm": True,
    }


def write_qwen3_like(config: ModelConfig) -> dict[str, Any]:
    """Return the settings that all Qwen 3 share."""
    return {**write_llama_like(config), **write_biases(config), "head_dim": config.head_dim}


def _write(config: ModelConfig) -> dict[str, Any]:
    return {**write_qwen3_like(config), **write_windows(config)}


QK_NORMS = (
    Module("norm", "layers.{}.attention.query_norm", ("model.layers.{}.self_attn.q_norm",)),
    Module("norm", "layers.{}.attention.key_norm", ("model.layers.{}.self_attn.k_norm",)),
)
"""Norms of queries and keys."""
QWEN3 = replace(
    LLAMA,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    read=_read,
    write=_write,
    layer=(*LLAMA.layer, *QK_NORMS),
)
