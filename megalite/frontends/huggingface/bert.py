"""BERT."""

from __future__ import annotations

from megalite.config import ModelConfig
from megalite.frontends.huggingface.family import QKV, VOCABULARY, Family, modules
from megalite.frontends.huggingface.gpt import WIDTH
from megalite.frontends.huggingface.settings import Fields, HFSettings, Rule, activation, fixed, only, setting
from megalite.utils.errors import UserError


def _read_heads(hf: HFSettings, _: Fields) -> Fields:
    if hf.get("position_embedding_type", "absolute") != "absolute" or hf.get("type_vocab_size", 2) != 2:
        raise UserError("a bert can only be converted with absolute positions and 2 token types")
    architectures = hf.get("architectures") or ["BertForPreTraining"]
    return {"bert_binary_head": "BertForMaskedLM" not in architectures}


def _write_heads(config: ModelConfig) -> Fields:
    return {
        "architectures": ["BertForPreTraining" if config.bert_binary_head else "BertForMaskedLM"],
        "type_vocab_size": 2,
        "tie_word_embeddings": True,
    }


_QKV = "attention.self.query attention.self.key attention.self.value"
BERT = Family(
    "bert",
    "BertForPreTraining",
    (
        only(is_decoder=False, add_cross_attention=False, tie_word_embeddings=True),
        Rule(_read_heads, _write_heads),
        fixed(architecture="bert", norm_position="post", embed_layernorm=True),
        setting("num_hidden_layers", "num_layers"),
        setting("hidden_size", "hidden_size"),
        WIDTH,
        setting("num_attention_heads", "num_attention_heads"),
        setting("max_position_embeddings", "seq_length", 512),
        activation("hidden_act", "gelu"),
        setting("layer_norm_eps", "norm_epsilon", 1e-12),
        setting("hidden_dropout_prob", "hidden_dropout", 0.1),
        setting("attention_probs_dropout_prob", "attention_dropout", 0.1),
    ),
    (
        *modules(
            "embedding.",
            "bert.embeddings.",
            ("table", "word", "word_embeddings", VOCABULARY),
            ("table", "position", "position_embeddings"),
            ("table", "token_type", "token_type_embeddings"),
            ("norm", "norm", "LayerNorm"),
        ),
        *modules(
            "token_head.",
            "cls.predictions.",
            ("linear", "dense", "transform.dense"),
            ("norm", "norm", "transform.LayerNorm"),
            ("vector", "output_bias", "bias", VOCABULARY),
        ),
        *modules(
            "order_head.",
            "",
            ("linear", "pooler", "bert.pooler.dense"),
            ("linear", "classifier", "cls.seq_relationship"),
            only_if=lambda config: config.bert_binary_head,
        ),
    ),
    modules(
        "layers.{}.",
        "bert.encoder.layer.{}.",
        ("qkv", "attention.qkv", _QKV, QKV),
        ("linear", "attention.projection", "attention.output.dense"),
        ("norm", "attention_norm", "attention.output.LayerNorm"),
        ("linear", "mlp.up", "intermediate.dense"),
        ("linear", "mlp.down", "output.dense"),
        ("norm", "mlp_norm", "output.LayerNorm"),
    ),
    prefix="bert.",
    heads=("cls.",),
    tied=True,
    without_effect=(
        *("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
        *("pooler_size_per_head", "pooler_type"),
    ),
    other_names={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
)
