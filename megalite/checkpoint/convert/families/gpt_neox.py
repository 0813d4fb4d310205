"""transformers' GPT-NeoX, the architecture of Pythia."""

from __future__ import annotations

from typing import Any

from megalite.checkpoint.convert.families.biases import read_biases, write_biases
from megalite.checkpoint.convert.families.family import OUTPUT, VOCABULARY, Family, Module
from megalite.checkpoint.convert.families.hf_settings import THEIR_ACTIVATIONS, HFSettings
from megalite.checkpoint.convert.families.rotary import read_rotary, write_rotary
from megalite.checkpoint.convert.model_settings import none_if_default
from megalite.config import ModelConfig


def _read(hf: HFSettings) -> dict[str, Any]:
    return {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": none_if_default(hf["intermediate_size"], 4 * hf["hidden_size"]),
        "num_attention_heads": hf["num_attention_heads"],
        "seq_length": hf.get("max_position_embeddings", 2048),
        "vocab_size": hf["vocab_size"],
        **read_rotary(hf, old_base="rotary_emb_base", share=hf.get("rotary_pct", 0.25)),
        **read_biases(hf, default=True, mlp=True),
        "parallel_residual": hf.get("use_parallel_residual", True),
        "norm_epsilon": hf.get("layer_norm_eps", 1e-5),
        "activation": hf.activation("hidden_act", "gelu"),
        "untie_embeddings_and_output_weights": not hf.switch("tie_word_embeddings", False),
        "hidden_dropout": hf.get("hidden_dropout", 0.0),
        "attention_dropout": hf.get("attention_dropout", 0.0),
        "init_method_std": hf.get("initializer_range", 0.02),
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_attention_heads": config.num_attention_heads,
        "max_position_embeddings": config.num_positions,
        **write_rotary(config, old_base="rotary_emb_base"),
        **write_biases(config),
        "rotary_pct": config.rotary_percent,
        "use_parallel_residual": config.parallel_residual,
        "layer_norm_eps": config.norm_epsilon,
        "hidden_act": THEIR_ACTIVATIONS.get(config.activation, "gelu"),
        "hidden_dropout": config.hidden_dropout,
        "attention_dropout": config.attention_dropout,
    }


_LAYER = "gpt_neox.layers.{}."
GPT_NEOX = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    "gpt_neox.",
    ("embed_out.",),
    _read,
    _write,
    (
        Module("table", "embedding.word", ("gpt_neox.embed_in",), VOCABULARY),
        Module("norm", "final_norm", ("gpt_neox.final_layer_norm",)),
        Module("table", "output", ("embed_out",), VOCABULARY, only_if=OUTPUT.only_if),
    ),
    (
        Module("norm", "layers.{}.attention_norm", (_LAYER + "input_layernorm",)),
        # The rows are grouped by head, [n, 3, d], which is our layout with r = 1.
        Module("qkv", "layers.{}.attention.qkv", (_LAYER + "attention.query_key_value",)),
        Module("attention_output", "layers.{}.attention.projection", (_LAYER + "attention.dense",)),
        Module("norm", "layers.{}.mlp_norm", (_LAYER + "post_attention_layernorm",)),
        Module("mlp", "layers.{}.mlp.up", (_LAYER + "mlp.dense_h_to_4h",)),
        Module("mlp", "layers.{}.mlp.down", (_LAYER + "mlp.dense_4h_to_h",)),
    ),
    other_names={"lm_head.weight": "embed_out.weight"},  # transformers 5 has another name than its files
)
