"""transformers' Gemma 3 for text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megalite.checkpoint.convert.families.family import Module
from megalite.checkpoint.convert.families.gemma2 import GEMMA2, read_gemma_like, write_gemma_like
from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.checkpoint.convert.families.llama import read_llama_like
from megalite.checkpoint.convert.families.rotary import read_rotary_by_layer, write_rotary_by_layer
from megalite.checkpoint.convert.families.windows import read_layer_types, write_layer_types
from megalite.config import ModelConfig

_OLD_BASE = "rope_local_base_freq"


def _read(hf: HFSettings) -> dict[str, Any]:
    hf.require("gemma3_text", attn_logit_softcapping=None)  # transformers' model ignores it
    rotary = read_rotary_by_layer(hf, 1000000.0, window_base=10000.0, old_window_base=_OLD_BASE)
    fields = read_gemma_like(hf, read_llama_like(hf, positions=131072, rotary=rotary), "gemma3_text")
    return {
        **fields,
        **read_layer_types(hf, fields, full_every=hf.get("sliding_window_pattern", 6)),
        "qk_layernorm": True,
        "final_logit_softcapping": hf.get("final_logit_softcapping"),
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_gemma_like(config),
        **write_layer_types(config),
        **write_rotary_by_layer(config, old_window_base=_OLD_BASE),
    }


GEMMA3 = replace(
    GEMMA2,
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    read=_read,
    write=_write,
    layer=(
        *GEMMA2.layer,
        Module("norm", "layers.{}.attention.query_norm", ("model.layers.{}.self_attn.q_norm",)),
        Module("norm", "layers.{}.attention.key_norm", ("model.layers.{}.self_attn.k_norm",)),
    ),
    without_effect=(*GEMMA2.without_effect, "_sliding_window_pattern"),
)
