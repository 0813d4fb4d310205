"""transformers' Gemma 4 for text, without experts and without embeddings of each layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.convert.families.family import Module, Parts, Transform
from megalite.checkpoint.convert.families.gemma2 import GEMMA2
from megalite.checkpoint.convert.families.hf_settings import HF_GATES, THEIR_GATES, HFSettings
from megalite.checkpoint.convert.families.llama import read_llama_like, write_llama_like
from megalite.checkpoint.convert.families.rotary import read_rotary_by_layer, write_rotary_by_layer
from megalite.checkpoint.convert.families.windows import FULL, read_layer_types, write_layer_types
from megalite.checkpoint.convert.model_settings import none_if_default
from megalite.config import ModelConfig
from megalite.errors import UserError


def _read(hf: HFSettings) -> dict[str, Any]:
    hf.require("gemma4_text", attention_bias=False, enable_moe_block=False)
    if hf.get("hidden_size_per_layer_input", 256):
        raise UserError("gemma4_text with hidden_size_per_layer_input cannot be converted: only 0 can")
    if hf.get("use_bidirectional_attention") not in (None, "vision"):  # text is causal with "vision"
        raise UserError("gemma4_text with use_bidirectional_attention all cannot be converted")
    rotary = read_rotary_by_layer(hf, 1000000.0, window_base=10000.0)
    sizes = read_llama_like(hf, positions=131072, rotary=rotary)
    is_double = hf.switch("use_double_wide_mlp", False)
    fields = {
        **sizes,
        **_read_heads(hf, sizes),
        "num_kv_shared_layers": hf.get("num_kv_shared_layers", 0),
        "kv_shared_ffn_hidden_size": 2 * sizes["ffn_hidden_size"] if is_double else None,
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


def _read_heads(hf: HFSettings, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return our fields of attention heads; `per_layer_config` has sizes of single layers."""
    head_dim, as_values = hf.get("head_dim", 256), hf.switch("attention_k_eq_v", False)
    own = {"head_dim": hf.get("global_head_dim", 512)}
    if as_values and hf.get("num_global_key_value_heads") is not None:
        own["num_key_value_heads"] = hf["num_global_key_value_heads"]
    by_layer, types = hf.get("per_layer_config"), hf.get("layer_types")
    if by_layer is not None and types is not None:
        full = {number for number, kind in enumerate(types) if kind == FULL}
        own = next(iter(by_layer.values()), {})
        if any(each != own for each in by_layer.values()) or {*map(int, by_layer)} != full:
            raise UserError(
                f"gemma4_text with other sizes than one for all layers of {FULL} cannot be converted"
            )
    groups = own.get("num_key_value_heads")
    return {
        "kv_channels": none_if_default(head_dim, sizes["hidden_size"] // sizes["num_attention_heads"]),
        "full_attention_kv_channels": own.get("head_dim"),
        "full_attention_query_groups": groups,
        "keys_as_values": "full_attention" if as_values else "none",
    }


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
        **write_llama_like(config),
        **write_layer_types(config),
        **write_rotary_by_layer(config),
        "head_dim": config.head_dim,
        "global_head_dim": config.full_attention_kv_channels or config.head_dim,
        "num_global_key_value_heads": config.full_attention_query_groups,
        "attention_k_eq_v": config.keys_as_values != "none",
        "num_kv_shared_layers": config.num_kv_shared_layers,
        "use_double_wide_mlp": config.kv_shared_ffn_hidden_size == 2 * config.ffn_size,
        "hidden_activation": THEIR_GATES.get(config.activation, "gelu_pytorch_tanh"),
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": config.final_logit_softcapping,
    }


def _split_queries_keys(full: Tensor, config: ModelConfig) -> Parts:
    """Split ``[g (r + 1) d, ...]`` into ``[n d, ...]`` and ``[g d, ...]``."""
    grouped = full.unflatten(0, (config.num_kv_heads, -1, config.head_dim))
    return [part.flatten(0, 2) for part in grouped.split((grouped.shape[1] - 1, 1), dim=1)]


def _join_queries_keys(parts: Parts, config: ModelConfig) -> Tensor:
    grouped = [part.unflatten(0, (config.num_kv_heads, -1, config.head_dim)) for part in parts]
    return torch.cat(grouped, dim=1).flatten(0, 2)


_ATTENTION, _OURS = "model.layers.{}.self_attn.", "layers.{}.attention."
_Q, _K = (_ATTENTION + "q_proj",), (_ATTENTION + "k_proj",)
GEMMA4 = replace(
    GEMMA2,
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    read=_read,
    write=_write,
    layer=(
        *(
            replace(module, only_in=lambda kind: kind.key_source is None and not kind.keys_as_values)
            if module.kind == "qkv"
            else module
            for module in GEMMA2.layer
        ),
        Module(
            "qkv",
            _OURS + "qkv",
            _Q + _K,
            Transform(_split_queries_keys, _join_queries_keys),
            only_in=lambda kind: kind.keys_as_values,
        ),
        Module("qkv", _OURS + "qkv", _Q, only_in=lambda kind: kind.key_source is not None),
        Module("norm", _OURS + "query_norm", (_ATTENTION + "q_norm",)),
        Module(
            "norm",
            _OURS + "key_norm",
            (_ATTENTION + "k_norm",),
            only_in=lambda kind: kind.key_source is None,
        ),
        Module("vector", "layers.{}.output_scale.weight", ("model.layers.{}.layer_scalar",)),
    ),
    without_effect=("vocab_size_per_layer_input", "num_experts", "top_k_experts", "moe_intermediate_size"),
)
