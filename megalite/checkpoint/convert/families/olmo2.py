"""transformers' OLMo 2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megalite.checkpoint.convert.families.biases import read_biases, write_biases
from megalite.checkpoint.convert.families.family import Module
from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.checkpoint.convert.families.llama import LLAMA, read_llama_like, write_llama_like
from megalite.config import ModelConfig


def _read(hf: HFSettings) -> dict[str, Any]:
    return read_olmo_like(hf)


def read_olmo_like(hf: HFSettings, rotary: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return our fields for the settings that OLMo 2 and 3 share.

    Args:
        rotary: see `read_llama_like`.
    """
    return {
        **read_llama_like(hf, epsilon=1e-5, rotary=rotary),
        **read_biases(hf),
        "norm_position": "output",
        "qk_layernorm": True,
        "qk_layernorm_width": "all_heads",
    }


def write_olmo_like(config: ModelConfig) -> dict[str, Any]:
    """Return the settings that OLMo 2 and 3 share."""
    return {**write_llama_like(config), **write_biases(config)}


_LAYER = "model.layers.{}."
OLMO2 = replace(
    LLAMA,
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    read=_read,
    write=write_olmo_like,
    layer=(
        *(module for module in LLAMA.layer if module.kind != "norm"),
        Module("norm", "layers.{}.attention_norm", (_LAYER + "post_attention_layernorm",)),
        Module("norm", "layers.{}.mlp_norm", (_LAYER + "post_feedforward_layernorm",)),
        Module("norm", "layers.{}.attention.query_norm", (_LAYER + "self_attn.q_norm",)),
        Module("norm", "layers.{}.attention.key_norm", (_LAYER + "self_attn.k_norm",)),
    ),
)
