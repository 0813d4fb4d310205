"""transformers' Gemma 4 for text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megalite.checkpoint.convert.families.biases import read_biases, write_biases
from megalite.checkpoint.convert.families.family import SAME, VOCABULARY, Module, Transform
from megalite.checkpoint.convert.families.gemma2 import GEMMA2
from megalite.checkpoint.convert.families.gemma4_attention import ATTENTION, read_heads
from megalite.checkpoint.convert.families.gemma4_experts import (
    EXPERTS,
    read_gemma4_experts,
    write_gemma4_experts,
)
from megalite.checkpoint.convert.families.hf_settings import HF_GATES, THEIR_GATES, HFSettings
from megalite.checkpoint.convert.families.llama import read_llama_like, write_llama_like
from megalite.checkpoint.convert.families.rotary import read_rotary_by_layer, write_rotary_by_kind
from megalite.checkpoint.convert.families.windows import read_layer_types, write_layer_types
from megalite.config import ModelConfig
from megalite.errors import UserError


def _read(hf: HFSettings) -> dict[str, Any]:
    embedding_size = hf.get("hidden_size_per_layer_input", 256) or None
    if embedding_size is not None:
        hf.require_equal("vocab_size_per_layer_input", "vocab_size", 262144)
    if hf.get("use_bidirectional_attention") not in (None, "vision"):  # text is causal with "vision"
        raise UserError("gemma4_text with use_bidirectional_attention all cannot be converted")
    rotary = read_rotary_by_layer(hf, 1000000.0, window_base=10000.0)
    sizes = read_llama_like(hf, positions=131072, rotary=rotary)
    is_double = hf.switch("use_double_wide_mlp", False)
    fields = {
        **sizes,
        **read_biases(hf),
        **read_heads(hf, sizes),
        "hidden_size_per_layer_input": embedding_size,
        "num_kv_shared_layers": hf.get("num_kv_shared_layers", 0),
        "kv_shared_ffn_hidden_size": 2 * sizes["ffn_hidden_size"] if is_double else None,
        **read_gemma4_experts(hf),
        "norm_position": "sandwich",
        "qk_layernorm": True,
        "value_layernorm": True,
        "layer_output_scale": True,
        "activation": hf.activation("hidden_activation", "gelu_pytorch_tanh", HF_GATES),
        "embedding_multiplier": sizes["hidden_size"] ** 0.5,
        "query_pre_attn_scalar": 1,
        "final_logit_softcapping": hf.get("final_logit_softcapping"),
        "untie_embeddings_and_output_weights": not hf.switch("tie_word_embeddings", True),
    }
    windows = read_layer_types(hf, fields, full_every=6)
    return {**fields, **windows} if windows else _in_all_layers(fields)


def _in_all_layers(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a model without windows, whose layers all have the sizes of full attention."""
    groups = fields["full_attention_query_groups"]
    return {
        **fields,
        "kv_channels": fields["full_attention_kv_channels"],
        "num_query_groups": fields["num_query_groups"] if groups is None else groups,
        "full_attention_kv_channels": None,
        "full_attention_query_groups": None,
        "keys_as_values": "all" if fields["keys_as_values"] == "full_attention" else "none",
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_llama_like(config, write_rotary_by_kind(config)),
        **write_biases(config),
        **write_layer_types(config),
        "head_dim": config.head_dim,
        "global_head_dim": config.full_attention_kv_channels or config.head_dim,
        "num_global_key_value_heads": config.full_attention_query_groups,
        "attention_k_eq_v": config.keys_as_values != "none",
        "num_kv_shared_layers": config.num_kv_shared_layers,
        "use_double_wide_mlp": config.kv_shared_ffn_hidden_size == 2 * config.ffn_size,
        "hidden_activation": THEIR_GATES.get(config.activation, "gelu_pytorch_tanh"),
        "hidden_size_per_layer_input": config.hidden_size_per_layer_input or 0,
        "vocab_size_per_layer_input": config.vocab_size,
        "final_logit_softcapping": config.final_logit_softcapping,
        **(write_gemma4_experts(config) if config.has_experts else {}),
    }


def _has_embeddings(config: ModelConfig) -> bool:
    return config.hidden_size_per_layer_input is not None


def _of_embeddings(kind: Any, ours: str, theirs: str, transform: Transform = SAME) -> Module:
    return Module(kind, ours, (theirs,), transform, only_if=_has_embeddings)


_LAYER, _GATE = "model.layers.{}.", "layers.{}.embedding_gate."
GEMMA4 = replace(
    GEMMA2,
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    read=_read,
    write=_write,
    ends=(
        *GEMMA2.ends,
        _of_embeddings("table", "embedding.layer_table", "model.embed_tokens_per_layer", VOCABULARY),
        _of_embeddings("table", "embedding.layer_projection", "model.per_layer_model_projection"),
        _of_embeddings("norm", "embedding.layer_norm", "model.per_layer_projection_norm"),
    ),
    layer=(
        *(module for module in GEMMA2.layer if module.kind != "qkv"),
        *ATTENTION,
        *EXPERTS,
        Module("vector", "layers.{}.output_scale.weight", (_LAYER + "layer_scalar",)),
        _of_embeddings("table", _GATE + "gate", _LAYER + "per_layer_input_gate"),
        _of_embeddings("table", _GATE + "projection", _LAYER + "per_layer_projection"),
        _of_embeddings("norm", _GATE + "norm", _LAYER + "post_per_layer_input_norm"),
    ),
    without_effect=("vocab_size_per_layer_input",),
)
