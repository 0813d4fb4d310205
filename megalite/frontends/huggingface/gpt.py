"""Models with LayerNorm: GPT-2, GPT-J, NeoX, BLOOM, BERT, StarCoder 2, StableLM, Phi, Nemotron and Cohere."""

from __future__ import annotations

from dataclasses import replace

from megalite.config import ModelConfig
from megalite.frontends import none_if_default
from megalite.frontends.huggingface.dense import FINAL_LAYERNORM, with_modules
from megalite.frontends.huggingface.family import CONV, CONV_QKV, OUTPUT, QKV, VOCABULARY, Family, modules
from megalite.frontends.huggingface.llama import LLAMA, WITHOUT_MTP, llama_like
from megalite.frontends.huggingface.positions import one_window, rotary, windows_with_rotation
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
    switch,
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


_LAYER_NORM = fixed(normalization="LayerNorm")
_SHARED_NORM = fixed(parallel_residual=True, parallel_shared_norm=True)
_ONE_NORM = tuple(module for module in LLAMA.layer if module.ours != "layers.{}.mlp_norm")
STARCODER2 = replace(
    WITHOUT_MTP,
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    rules=(
        only(mlp_type="default", norm_type="layer_norm"),
        *llama_like(
            4096,
            1e-5,
            writes_head_dim=False,
            norm="norm_epsilon",
            function=activation("hidden_act", "gelu_pytorch_tanh"),
        ),
        _LAYER_NORM,
        switch("use_bias", "add_bias_linear", True),
        hidden_dropout("embedding_dropout", "residual_dropout"),
        one_window(),
    ),
    layer=with_modules(LLAMA.layer, ("mlp", "mlp.up", "mlp.c_fc"), ("mlp", "mlp.down", "mlp.c_proj")),
    tied=True,
    # Published files have them; transformers' model does not read them.
    without_effect=(
        *("activation_function", "attention_softmax_in_fp32", "layer_norm_epsilon", "rms_norm_eps"),
        *("scale_attention_softmax_in_fp32", "scale_attn_weights"),
    ),
)
STABLELM = replace(
    WITHOUT_MTP,
    model_type="stablelm",
    architecture="StableLmForCausalLM",
    rules=(
        only(qk_layernorm=False, hidden_dropout=0.0),
        *llama_like(
            4096,
            1e-5,
            rotary=rotary(share=("partial_rotary_factor", 0.25)),
            writes_head_dim=False,
            norm="layer_norm_eps",
        ),
        _LAYER_NORM,
        switch("use_qkv_bias", "add_qkv_bias", False, "has_qkv_bias"),
        switch("use_parallel_residual", "parallel_residual", False),
        Rule(lambda _, fields: {"parallel_shared_norm": fields["parallel_residual"]}),
    ),
    layer=tuple(
        replace(module, only_if=lambda config: not config.parallel_shared_norm)
        if module.ours.endswith("mlp_norm")
        else module
        for module in LLAMA.layer
    ),
)
PHI = replace(
    WITHOUT_MTP,
    model_type="phi",
    architecture="PhiForCausalLM",
    rules=(
        *llama_like(
            2048,
            1e-5,
            rotary=rotary(share=("partial_rotary_factor", 0.5)),
            writes_head_dim=False,
            norm="layer_norm_eps",
            function=activation("hidden_act", "gelu_new"),
        ),
        _LAYER_NORM,
        _SHARED_NORM,
        fixed(add_bias_linear=True, add_output_bias=True),
        switch("qk_layernorm", "qk_layernorm", False),
        hidden_dropout("embd_pdrop", "resid_pdrop"),
    ),
    ends=(
        *FINAL_LAYERNORM,
        *modules("", "", ("vector", "output.bias", "lm_head.bias", VOCABULARY)),
    ),
    layer=(
        *with_modules(
            _ONE_NORM,
            ("attention_output", "attention.projection", "self_attn.dense"),
            ("mlp", "mlp.up", "mlp.fc1"),
            ("mlp", "mlp.down", "mlp.fc2"),
        ),
        *modules(
            "layers.{}.attention.",
            "model.layers.{}.self_attn.",
            ("norm", "query_norm", "q_layernorm"),
            ("norm", "key_norm", "k_layernorm"),
            only_if=lambda config: config.qk_layernorm,
        ),
    ),
)
NEMOTRON = replace(
    WITHOUT_MTP,
    model_type="nemotron",
    architecture="NemotronForCausalLM",
    rules=(
        *llama_like(
            4096,
            1e-5,
            rotary=rotary(share=("partial_rotary_factor", 0.5)),
            norm="norm_eps",
            function=activation("hidden_act", "relu2"),
        ),
        _LAYER_NORM,
        fixed(zero_centered_norms=True),
        biases(mlp=None),
    ),
    layer=with_modules(LLAMA.layer, ("mlp", "mlp.up", "mlp.up_proj")),
)


def _cohere(positions: Rule) -> tuple[Rule, ...]:
    """Return the rules of Command R with a rule of rotary positions."""
    return (
        only(use_qk_norm=False),
        *llama_like(8192, 1e-5, rotary=positions, writes_head_dim=False, norm="layer_norm_eps"),
        _LAYER_NORM,
        _SHARED_NORM,
        fixed(add_norm_bias=False, rotary_interleaved=True),
        biases(),
        setting("logit_scale", "logit_multiplier", 0.0625),
    )


COHERE = replace(
    WITHOUT_MTP,
    model_type="cohere",
    architecture="CohereForCausalLM",
    rules=_cohere(rotary(500000.0)),
    layer=_ONE_NORM,
    tied=True,
    without_effect=("model_max_length",),
)
COHERE2 = replace(
    COHERE,
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    rules=(
        only(use_gated_activation=True, use_parallel_block=True, rotary_pct=1.0),
        only(position_embedding_type="rope_gptj"),
        *_cohere(rotary()),
        windows_with_rotation(4, "sliding_window_pattern"),
    ),
    # Of generation and of other programs.
    without_effect=(
        *("cache_implementation", "layer_switch", "order_of_interleaved_layers", "use_embedding_sharing"),
        "use_parallel_embedding",
    ),
)
