"""GPT-2, GPT-J, GPT-NeoX, BLOOM and BERT."""

from __future__ import annotations

from dataclasses import replace

from megalite.config import ModelConfig
from megalite.frontends import none_if_default
from megalite.frontends.huggingface.family import CONV, CONV_QKV, OUTPUT, QKV, VOCABULARY, Family, modules
from megalite.frontends.huggingface.positions import rotary
from megalite.frontends.huggingface.settings import (
    Fields,
    HFSettings,
    Rule,
    activation,
    biases,
    fixed,
    hidden_dropout,
    only,
    setting,
)
from megalite.utils.errors import UserError


def _gpt2_like(dropout: float) -> tuple[Rule, ...]:
    """Return the rules that GPT-2 and GPT-J share; `dropout` is the default of their dropouts."""
    return (
        hidden_dropout("embd_pdrop", "resid_pdrop", dropout),
        setting("n_layer num_hidden_layers", "num_layers"),
        setting("n_embd hidden_size", "hidden_size"),
        setting("n_head num_attention_heads", "num_attention_heads"),
        Rule(
            lambda hf, _: {"ffn_hidden_size": hf.get("n_inner")},
            lambda config: {"n_inner": none_if_default(config.ffn_size, 4 * config.hidden_size)},
        ),
        setting("n_positions max_position_embeddings", "seq_length"),
        setting("layer_norm_epsilon", "norm_epsilon", 1e-5),
        activation("activation_function", "gelu_new"),
        setting("attn_pdrop", "attention_dropout", dropout),
    )


_SUMMARY = (
    *("n_ctx", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type"),
    "summary_use_proj",
)
"""Settings without effect on a language model."""
_GPT2_ENDS = (
    *modules(
        "",
        "transformer.",
        ("table", "embedding.word", "wte", VOCABULARY),
        ("norm", "final_norm", "ln_f"),
    ),
    OUTPUT,
)
GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    (
        only(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False),
        *_gpt2_like(dropout=0.1),
        fixed(position_embedding_type="learned_absolute"),
    ),
    (*_GPT2_ENDS, *modules("", "transformer.", ("table", "embedding.position", "wpe"))),
    modules(
        "layers.{}.",
        "transformer.h.{}.",
        ("norm", "attention_norm", "ln_1"),
        ("qkv", "attention.qkv", "attn.c_attn", CONV_QKV),
        ("linear", "attention.projection", "attn.c_proj", CONV),
        ("norm", "mlp_norm", "ln_2"),
        ("linear", "mlp.up", "mlp.c_fc", CONV),
        ("linear", "mlp.down", "mlp.c_proj", CONV),
    ),
    prefix="transformer.",
    tied=True,
    without_effect=(*_SUMMARY, "reorder_and_upcast_attn"),
)


def _read_rotary_dim(hf: HFSettings, fields: Fields) -> Fields:
    head_dim = max(1, fields["hidden_size"] // fields["num_attention_heads"])
    num_rotated = hf.get("rotary_dim", 64)
    if num_rotated is None or not 0 < num_rotated <= head_dim:
        raise UserError(f"gptj with rotary_dim {num_rotated} cannot be converted: 1 to {head_dim} can")
    return {"position_embedding_type": "rope", "rotary_percent": num_rotated / head_dim}


def _write_rotary_dim(config: ModelConfig) -> Fields:
    head_dim = config.hidden_size // config.num_attention_heads
    return {"rotary_dim": max(1, min(int(config.head_dim * config.rotary_percent), head_dim))}


GPTJ = Family(
    "gptj",
    "GPTJForCausalLM",
    (
        *_gpt2_like(dropout=0.0),
        Rule(_read_rotary_dim, _write_rotary_dim),
        fixed(rotary_interleaved=True, parallel_residual=True, parallel_shared_norm=True),
        fixed(add_bias_linear=False, add_mlp_bias=True, add_output_bias=True),
    ),
    (*_GPT2_ENDS, *modules("", "", ("vector", "output.bias", "lm_head.bias", VOCABULARY))),
    modules(
        "layers.{}.",
        "transformer.h.{}.",
        ("norm", "attention_norm", "ln_1"),
        ("qkv", "attention.qkv", "attn.q_proj attn.k_proj attn.v_proj", QKV),
        ("linear", "attention.projection", "attn.out_proj"),
        ("mlp", "mlp.up", "mlp.fc_in"),
        ("mlp", "mlp.down", "mlp.fc_out"),
    ),
    prefix="transformer.",
    without_effect=(*_SUMMARY, "rotary", "scale_attn_weights"),
)
WIDTH = Rule(
    lambda hf, _: {"ffn_hidden_size": none_if_default(hf["intermediate_size"], 4 * hf["hidden_size"])},
    lambda config: {"intermediate_size": config.ffn_size},
)
"""Width of an MLP without a gate."""
GPT_NEOX = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    (
        setting("num_hidden_layers", "num_layers"),
        setting("hidden_size", "hidden_size"),
        WIDTH,
        setting("num_attention_heads", "num_attention_heads"),
        setting("max_position_embeddings", "seq_length", 2048),
        rotary(old_base="rotary_emb_base", share=("rotary_pct", 0.25)),
        biases(default=True, mlp=True),
        setting("use_parallel_residual", "parallel_residual", True),
        setting("layer_norm_eps", "norm_epsilon", 1e-5),
        activation("hidden_act", "gelu"),
        setting("hidden_dropout", "hidden_dropout", 0.0),
        setting("attention_dropout", "attention_dropout", 0.0),
    ),
    (
        *modules(
            "",
            "gpt_neox.",
            ("table", "embedding.word", "embed_in", VOCABULARY),
            ("norm", "final_norm", "final_layer_norm"),
        ),
        replace(OUTPUT, theirs=("embed_out",)),
    ),
    modules(
        "layers.{}.",
        "gpt_neox.layers.{}.",
        ("norm", "attention_norm", "input_layernorm"),
        # The rows are grouped by head, [n, 3, d], which is our layout with r = 1.
        ("qkv", "attention.qkv", "attention.query_key_value"),
        ("attention_output", "attention.projection", "attention.dense"),
        ("norm", "mlp_norm", "post_attention_layernorm"),
        ("mlp", "mlp.up", "mlp.dense_h_to_4h"),
        ("mlp", "mlp.down", "mlp.dense_4h_to_h"),
    ),
    prefix="gpt_neox.",
    heads=("embed_out.",),
    other_names={"lm_head.weight": "embed_out.weight"},  # transformers 5 has another name than its files
)


BLOOM = Family(
    "bloom",
    "BloomForCausalLM",
    (
        setting("n_layer num_hidden_layers", "num_layers"),
        Rule(  # the old name takes precedence, as in transformers
            lambda hf, _: {"hidden_size": hf["n_embed hidden_size"]},
            lambda config: {"hidden_size": config.hidden_size},
        ),
        setting("n_head num_attention_heads", "num_attention_heads"),
        setting("seq_length", "seq_length", 2048, "seq_length"),
        fixed(position_embedding_type="alibi", embed_layernorm=True),
        setting("layer_norm_epsilon", "norm_epsilon", 1e-5),
        setting("hidden_dropout", "hidden_dropout", 0.0),
        setting("attention_dropout", "attention_dropout", 0.0),
        replace(
            only(apply_residual_connection_post_layernorm=False),
            write=lambda config: {"apply_residual_connection_post_layernorm": False},
        ),
    ),
    (
        *modules(
            "",
            "transformer.",
            ("table", "embedding.word", "word_embeddings", VOCABULARY),
            ("norm", "embedding.norm", "word_embeddings_layernorm"),
            ("norm", "final_norm", "ln_f"),
        ),
        OUTPUT,
    ),
    modules(
        "layers.{}.",
        "transformer.h.{}.",
        ("norm", "attention_norm", "input_layernorm"),
        # The rows are grouped by head, [n, 3, d], which is our layout with r = 1.
        ("qkv", "attention.qkv", "self_attention.query_key_value"),
        ("linear", "attention.projection", "self_attention.dense"),
        ("norm", "mlp_norm", "post_attention_layernorm"),
        ("linear", "mlp.up", "mlp.dense_h_to_4h"),
        ("linear", "mlp.down", "mlp.dense_4h_to_h"),
    ),
    prefix="transformer.",
    tied=True,
    without_effect=(
        *("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "n_inner"),
        *("offset_alibi", "skip_bias_add", "skip_bias_add_qkv", "slow_but_exact"),
    ),
)


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
