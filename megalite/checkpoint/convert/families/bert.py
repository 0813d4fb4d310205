"""transformers' BERT."""

from __future__ import annotations

from typing import Any

from megalite.checkpoint.convert.families.family import QKV, VOCABULARY, Family, Module
from megalite.checkpoint.convert.families.hf_settings import THEIR_ACTIVATIONS, HFSettings
from megalite.checkpoint.convert.model_settings import none_if_default
from megalite.config import ModelConfig
from megalite.errors import UserError


def _read(hf: HFSettings) -> dict[str, Any]:
    hf.require("bert", is_decoder=False, add_cross_attention=False, tie_word_embeddings=True)
    if hf.get("position_embedding_type", "absolute") != "absolute" or hf.get("type_vocab_size", 2) != 2:
        raise UserError("a bert can only be converted with absolute positions and 2 token types")
    architectures = hf.get("architectures") or ["BertForPreTraining"]
    return {
        "architecture": "bert",
        "bert_binary_head": "BertForMaskedLM" not in architectures,
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": none_if_default(hf["intermediate_size"], 4 * hf["hidden_size"]),
        "num_attention_heads": hf["num_attention_heads"],
        "seq_length": hf.get("max_position_embeddings", 512),
        "vocab_size": hf["vocab_size"],
        "norm_position": "post",
        "embed_layernorm": True,
        "activation": hf.activation("hidden_act", "gelu"),
        "norm_epsilon": hf.get("layer_norm_eps", 1e-12),
        "hidden_dropout": hf.get("hidden_dropout_prob", 0.1),
        "attention_dropout": hf.get("attention_probs_dropout_prob", 0.1),
        "init_method_std": hf.get("initializer_range", 0.02),
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["BertForPreTraining" if config.bert_binary_head else "BertForMaskedLM"],
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_attention_heads": config.num_attention_heads,
        "max_position_embeddings": config.num_positions,
        "type_vocab_size": 2,
        "tie_word_embeddings": True,
        "hidden_act": THEIR_ACTIVATIONS.get(config.activation, "gelu_new"),
        "layer_norm_eps": config.norm_epsilon,
        "hidden_dropout_prob": config.hidden_dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
    }


def _has_order_head(config: ModelConfig) -> bool:
    return config.bert_binary_head


BERT = Family(
    "bert",
    "BertForPreTraining",
    "bert.",
    ("cls.",),
    _read,
    _write,
    (
        Module("table", "embedding.word", ("bert.embeddings.word_embeddings",), VOCABULARY),
        Module("table", "embedding.position", ("bert.embeddings.position_embeddings",)),
        Module("table", "embedding.token_type", ("bert.embeddings.token_type_embeddings",)),
        Module("norm", "embedding.norm", ("bert.embeddings.LayerNorm",)),
        Module("linear", "token_head.dense", ("cls.predictions.transform.dense",)),
        Module("norm", "token_head.norm", ("cls.predictions.transform.LayerNorm",)),
        Module("vector", "token_head.output_bias", ("cls.predictions.bias",), VOCABULARY),
        Module("linear", "order_head.pooler", ("bert.pooler.dense",), only_if=_has_order_head),
        Module("linear", "order_head.classifier", ("cls.seq_relationship",), only_if=_has_order_head),
    ),
    (
        Module(
            "qkv",
            "layers.{}.attention.qkv",
            tuple(f"bert.encoder.layer.{{}}.attention.self.{part}" for part in ("query", "key", "value")),
            QKV,
        ),
        Module("linear", "layers.{}.attention.projection", ("bert.encoder.layer.{}.attention.output.dense",)),
        Module("norm", "layers.{}.attention_norm", ("bert.encoder.layer.{}.attention.output.LayerNorm",)),
        Module("linear", "layers.{}.mlp.up", ("bert.encoder.layer.{}.intermediate.dense",)),
        Module("linear", "layers.{}.mlp.down", ("bert.encoder.layer.{}.output.dense",)),
        Module("norm", "layers.{}.mlp_norm", ("bert.encoder.layer.{}.output.LayerNorm",)),
    ),
    (
        *("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
        *("pooler_size_per_head", "pooler_type"),
    ),
    {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
)
