"""transformers' GPT-2."""

from __future__ import annotations

from typing import Any

from megalite.checkpoint.convert.families.family import CONV, CONV_QKV, OUTPUT, VOCABULARY, Family, Module
from megalite.checkpoint.convert.families.hf_settings import THEIR_ACTIVATIONS, HFSettings
from megalite.checkpoint.convert.model_settings import none_if_default
from megalite.config import ModelConfig


def _read(hf: HFSettings) -> dict[str, Any]:
    hf.require(
        "gpt2", scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False
    )
    hf.require_equal("embd_pdrop", "resid_pdrop", default=0.1)
    return {
        "num_layers": hf.first("n_layer", "num_hidden_layers"),
        "hidden_size": hf.first("n_embd", "hidden_size"),
        "num_attention_heads": hf.first("n_head", "num_attention_heads"),
        "ffn_hidden_size": hf.get("n_inner"),
        "seq_length": hf.first("n_positions", "max_position_embeddings"),
        "vocab_size": hf["vocab_size"],
        "position_embedding_type": "learned_absolute",
        "activation": hf.activation("activation_function", "gelu_new"),
        "norm_epsilon": hf.get("layer_norm_epsilon", 1e-5),
        "untie_embeddings_and_output_weights": not hf.switch("tie_word_embeddings", True),
        "hidden_dropout": hf.get("resid_pdrop", 0.1),
        "attention_dropout": hf.get("attn_pdrop", 0.1),
        "init_method_std": hf.get("initializer_range", 0.02),
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "n_layer": config.num_layers,
        "n_embd": config.hidden_size,
        "n_head": config.num_attention_heads,
        "n_inner": none_if_default(config.ffn_size, 4 * config.hidden_size),
        "n_positions": config.num_positions,
        "activation_function": THEIR_ACTIVATIONS.get(config.activation, "gelu_new"),
        "layer_norm_epsilon": config.norm_epsilon,
        "embd_pdrop": config.hidden_dropout,
        "resid_pdrop": config.hidden_dropout,
        "attn_pdrop": config.attention_dropout,
    }


GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    "transformer.",
    ("lm_head.",),
    _read,
    _write,
    (
        Module("table", "embedding.word", ("transformer.wte",), VOCABULARY),
        Module("table", "embedding.position", ("transformer.wpe",)),
        Module("norm", "final_norm", ("transformer.ln_f",)),
        OUTPUT,
    ),
    (
        Module("norm", "layers.{}.attention_norm", ("transformer.h.{}.ln_1",)),
        Module("qkv", "layers.{}.attention.qkv", ("transformer.h.{}.attn.c_attn",), CONV_QKV),
        Module("linear", "layers.{}.attention.projection", ("transformer.h.{}.attn.c_proj",), CONV),
        Module("norm", "layers.{}.mlp_norm", ("transformer.h.{}.ln_2",)),
        Module("linear", "layers.{}.mlp.up", ("transformer.h.{}.mlp.c_fc",), CONV),
        Module("linear", "layers.{}.mlp.down", ("transformer.h.{}.mlp.c_proj",), CONV),
    ),
    (
        *("n_ctx", "reorder_and_upcast_attn", "summary_activation", "summary_first_dropout"),
        *("summary_proj_to_labels", "summary_type", "summary_use_proj"),
    ),
)
