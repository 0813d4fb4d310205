"""transformers' Llama."""

from __future__ import annotations

from typing import Any

from megalite.checkpoint.convert.families.biases import read_biases, write_biases
from megalite.checkpoint.convert.families.family import (
    HALVES,
    MTP_PARTS,
    OUTPUT,
    QKV,
    VOCABULARY,
    Family,
    Module,
)
from megalite.checkpoint.convert.families.hf_settings import HF_GATES, THEIR_GATES, HFSettings
from megalite.checkpoint.convert.families.rotary import read_rotary, write_rotary
from megalite.checkpoint.convert.model_settings import none_if_default
from megalite.config import ModelConfig


def _read(hf: HFSettings) -> dict[str, Any]:
    return {**read_llama_like(hf), **read_biases(hf, mlp=hf.switch("mlp_bias", False))}


def read_llama_like(
    hf: HFSettings,
    positions: int = 2048,
    base: float = 10000.0,
    epsilon: float = 1e-6,
    rotary: dict[str, Any] | None = None,
    width: str = "intermediate_size",
) -> dict[str, Any]:
    """Return our fields for the settings that all descendants of Llama share.

    Args:
        positions, base, epsilon: defaults of `max_position_embeddings`, `rope_theta` and `rms_norm_eps`.
        rotary: our fields of rotary positions, if the family has other settings for them than Llama.
        width: their name of the MLP's width.
    """
    return {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf[width],
        "num_attention_heads": hf["num_attention_heads"],
        "num_query_groups": none_if_default(hf.get("num_key_value_heads"), hf["num_attention_heads"]),
        "kv_channels": none_if_default(hf.get("head_dim"), hf["hidden_size"] // hf["num_attention_heads"]),
        "seq_length": hf.get("max_position_embeddings", positions),
        "vocab_size": hf["vocab_size"],
        **(read_rotary(hf, base) if rotary is None else rotary),
        "normalization": "RMSNorm",
        "norm_epsilon": hf.get("rms_norm_eps", epsilon),
        "activation": hf.activation("hidden_act", "silu", HF_GATES),
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": not hf.switch("tie_word_embeddings", False),
        "hidden_dropout": 0.0,
        "attention_dropout": hf.get("attention_dropout", 0.0),
        "init_method_std": hf.get("initializer_range", 0.02),
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_llama_like(config),
        "head_dim": config.head_dim,
        **write_biases(config),
        "mlp_bias": config.has_mlp_bias,
    }


def write_llama_like(config: ModelConfig, rotary: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what all descendants of Llama share; `rotary` are a family's own rotary settings."""
    return {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_kv_heads,
        "max_position_embeddings": config.num_positions,
        "hidden_act": THEIR_GATES.get(config.activation, "silu"),
        "rms_norm_eps": config.norm_epsilon,
        **(write_rotary(config) if rotary is None else rotary),
        "attention_dropout": config.attention_dropout,
    }


LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    "model.",
    ("lm_head.",),
    _read,
    _write,
    (
        Module("table", "embedding.word", ("model.embed_tokens",), VOCABULARY),
        Module("norm", "final_norm", ("model.norm",)),
        OUTPUT,
    ),
    (
        Module("norm", "layers.{}.attention_norm", ("model.layers.{}.input_layernorm",)),
        Module(
            "qkv",
            "layers.{}.attention.qkv",
            tuple(f"model.layers.{{}}.self_attn.{part}_proj" for part in "qkv"),
            QKV,
        ),
        Module("attention_output", "layers.{}.attention.projection", ("model.layers.{}.self_attn.o_proj",)),
        Module("norm", "layers.{}.mlp_norm", ("model.layers.{}.post_attention_layernorm",)),
        Module(
            "mlp",
            "layers.{}.mlp.up",
            tuple(f"model.layers.{{}}.mlp.{part}_proj" for part in ("gate", "up")),
            HALVES,
        ),
        Module("mlp", "layers.{}.mlp.down", ("model.layers.{}.mlp.down_proj",)),
    ),
    mtp=MTP_PARTS,
)
