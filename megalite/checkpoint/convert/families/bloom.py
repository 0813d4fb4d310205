"""transformers' BLOOM."""

from __future__ import annotations

from typing import Any

from megalite.checkpoint.convert.families.family import OUTPUT, VOCABULARY, Family, Module
from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.config import ModelConfig


def _read(hf: HFSettings) -> dict[str, Any]:
    hf.require("bloom", apply_residual_connection_post_layernorm=False)
    return {
        "num_layers": hf.first("n_layer", "num_hidden_layers"),
        "hidden_size": hf.first("n_embed", "hidden_size"),  # the old name wins, as in transformers
        "num_attention_heads": hf.first("n_head", "num_attention_heads"),
        "seq_length": hf.get("seq_length", 2048),
        "vocab_size": hf["vocab_size"],
        "position_embedding_type": "alibi",
        "embed_layernorm": True,
        "norm_epsilon": hf.get("layer_norm_epsilon", 1e-5),
        "untie_embeddings_and_output_weights": not hf.switch("tie_word_embeddings", True),
        "hidden_dropout": hf.get("hidden_dropout", 0.0),
        "attention_dropout": hf.get("attention_dropout", 0.0),
        "init_method_std": hf.get("initializer_range", 0.02),
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "n_layer": config.num_layers,
        "hidden_size": config.hidden_size,
        "n_head": config.num_attention_heads,
        "seq_length": config.seq_length,
        "layer_norm_epsilon": config.norm_epsilon,
        "hidden_dropout": config.hidden_dropout,
        "attention_dropout": config.attention_dropout,
        "apply_residual_connection_post_layernorm": False,
    }


BLOOM = Family(
    "bloom",
    "BloomForCausalLM",
    "transformer.",
    ("lm_head.",),
    _read,
    _write,
    (
        Module("table", "embedding.word", ("transformer.word_embeddings",), VOCABULARY),
        Module("norm", "embedding.norm", ("transformer.word_embeddings_layernorm",)),
        Module("norm", "final_norm", ("transformer.ln_f",)),
        OUTPUT,
    ),
    (
        Module("norm", "layers.{}.attention_norm", ("transformer.h.{}.input_layernorm",)),
        # The rows are grouped by head, [n, 3, d], which is our layout with r = 1.
        Module("qkv", "layers.{}.attention.qkv", ("transformer.h.{}.self_attention.query_key_value",)),
        Module("linear", "layers.{}.attention.projection", ("transformer.h.{}.self_attention.dense",)),
        Module("norm", "layers.{}.mlp_norm", ("transformer.h.{}.post_attention_layernorm",)),
        Module("linear", "layers.{}.mlp.up", ("transformer.h.{}.mlp.dense_h_to_4h",)),
        Module("linear", "layers.{}.mlp.down", ("transformer.h.{}.mlp.dense_4h_to_h",)),
    ),
    (
        *("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "n_inner"),
        *("offset_alibi", "skip_bias_add", "skip_bias_add_qkv", "slow_but_exact"),
    ),
)
