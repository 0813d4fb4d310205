"""transformers' Gemma 2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megalite.checkpoint.convert.families.biases import read_biases, write_biases
from megalite.checkpoint.convert.families.family import Module
from megalite.checkpoint.convert.families.hf_settings import HF_GATES, THEIR_GATES, HFSettings
from megalite.checkpoint.convert.families.llama import LLAMA, read_llama_like, write_llama_like
from megalite.checkpoint.convert.families.windows import read_layer_types, write_layer_types
from megalite.checkpoint.convert.model_settings import none_if_default
from megalite.config import ModelConfig
from megalite.errors import UserError


def _read(hf: HFSettings) -> dict[str, Any]:
    fields = read_gemma_like(hf, read_llama_like(hf, positions=8192), "gemma2")
    return {
        **fields,
        **read_layer_types(hf, fields, full_every=2),
        "attn_logit_softcapping": hf.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": hf.get("final_logit_softcapping", 30.0),
    }


def read_gemma_like(hf: HFSettings, fields: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return our fields for the settings that Gemma 2 and 3 share.

    Args:
        fields: result of `read_llama_like`.
        kind: name of the family, for messages.
    """
    if hf.get("use_bidirectional_attention"):
        raise UserError(f"{kind} with use_bidirectional_attention cannot be converted")
    usual = fields["hidden_size"] // fields["num_attention_heads"]
    return {
        **fields,
        **read_biases(hf),
        "kv_channels": none_if_default(hf.get("head_dim", 256), usual),
        "norm_position": "sandwich",
        "zero_centered_norms": True,
        "activation": hf.activation("hidden_activation", "gelu_pytorch_tanh", HF_GATES),
        "embedding_multiplier": fields["hidden_size"] ** 0.5,
        "query_pre_attn_scalar": hf.get("query_pre_attn_scalar", 256),
        "untie_embeddings_and_output_weights": not hf.switch("tie_word_embeddings", True),
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    return {**write_gemma_like(config), **write_layer_types(config)}


def write_gemma_like(config: ModelConfig) -> dict[str, Any]:
    """Return the settings that Gemma 2 and 3 share."""
    return {
        **write_llama_like(config),
        **write_biases(config),
        "head_dim": config.head_dim,
        "hidden_activation": THEIR_GATES.get(config.activation, "gelu_pytorch_tanh"),
        "query_pre_attn_scalar": int(config.query_pre_attn_scalar or config.head_dim),
        "attn_logit_softcapping": config.attn_logit_softcapping,
        "final_logit_softcapping": config.final_logit_softcapping,
    }


_LAYER = "model.layers.{}."
GEMMA2 = replace(
    LLAMA,
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    read=_read,
    write=_write,
    layer=(
        *(module for module in LLAMA.layer if module.kind != "norm"),
        Module("norm", "layers.{}.attention_norm", (_LAYER + "input_layernorm",)),
        Module("norm", "layers.{}.attention_output_norm", (_LAYER + "post_attention_layernorm",)),
        Module("norm", "layers.{}.mlp_norm", (_LAYER + "pre_feedforward_layernorm",)),
        Module("norm", "layers.{}.mlp_output_norm", (_LAYER + "post_feedforward_layernorm",)),
    ),
    without_effect=("cache_implementation",),
)
