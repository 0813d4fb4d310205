"""Models with attention in some layers and another mixer in the others: LFM2."""

from __future__ import annotations

from dataclasses import replace

from megalite.config import ModelConfig
from megalite.config.model.recurrence import GatedConvolutionSpec
from megalite.frontends.huggingface.family import (
    HALVES,
    OUTPUT,
    QKV,
    SAME,
    VOCABULARY,
    by_kind,
    modules,
    with_kernel_dim,
)
from megalite.frontends.huggingface.llama import WITHOUT_MTP, llama_like
from megalite.frontends.huggingface.positions import recurrent_layers, rotary
from megalite.frontends.huggingface.settings import Fields, HFSettings, Rule, fixed, only, setting

_OURS, _THEIRS = "layers.{}.", "model.layers.{}."


def _read_lfm2_width(hf: HFSettings, _: Fields) -> Fields:
    width, multiple = hf["block_ff_dim intermediate_size"], hf.get("block_multiple_of", 256)
    factor = hf.get("block_ffn_dim_multiplier", 1.0)
    if hf.switch("block_auto_adjust_ff_dim", True):
        width = int(2 * width / 3)
        if factor is not None:
            width = -(-int(factor * width) // multiple) * multiple
    return {"ffn_hidden_size": width}


def _write_lfm2_width(config: ModelConfig) -> Fields:
    return {"intermediate_size": config.ffn_size, "block_auto_adjust_ff_dim": False}


def _lfm2_convolutions(hf: HFSettings, num_layers: int) -> list[bool]:
    with_attention = hf.get("full_attn_idxs")
    return [with_attention is not None and number not in with_attention for number in range(num_layers)]


LFM2 = replace(
    WITHOUT_MTP,
    model_type="lfm2",
    architecture="Lfm2ForCausalLM",
    rules=(
        only(conv_bias=False, tie_embedding=True),
        *llama_like(
            128000,
            1e-5,
            rotary=rotary(1000000.0),
            width="block_ff_dim intermediate_size",
            writes_head_dim=False,
            norm="norm_eps",
            function=fixed(activation="swiglu"),
        ),
        Rule(_read_lfm2_width, _write_lfm2_width),
        fixed(qk_layernorm=True, attention_dropout=0.0),
        recurrent_layers(
            "gated_convolution",
            _lfm2_convolutions,
            setting("conv_L_cache", "linear_conv_kernel_dim", 3),
            kind="conv",
        ),
    ),
    ends=(
        *modules(
            "",
            "model.",
            ("table", "embedding.word", "embed_tokens", VOCABULARY),
            ("norm", "final_norm", "embedding_norm"),
        ),
        OUTPUT,
    ),
    layer=(
        *modules(
            _OURS,
            _THEIRS,
            ("norm", "attention_norm", "operator_norm"),
            ("norm", "mlp_norm", "ffn_norm"),
            ("mlp", "mlp.up", "feed_forward.w1 feed_forward.w3", HALVES),
            ("mlp", "mlp.down", "feed_forward.w2"),
        ),
        *modules(
            f"{_OURS}attention.",
            f"{_THEIRS}self_attn.",
            ("qkv", "qkv", "q_proj k_proj v_proj", QKV),
            ("attention_output", "projection", "out_proj"),
            ("norm", "query_norm", "q_layernorm"),
            ("norm", "key_norm", "k_layernorm"),
            only_in=lambda spec: spec.attention is not None,
        ),
        *modules(
            f"{_OURS}gated_convolution.",
            f"{_THEIRS}conv.",
            (
                "table",
                "in_projection",
                "in_proj",
                by_kind(lambda place: (place.config.hidden_size, GatedConvolutionSpec.group_rows)),
            ),
            ("table", "convolution", "conv", with_kernel_dim(SAME)),
            ("table", "projection", "out_proj"),
            only_in=lambda spec: isinstance(spec.mixer, GatedConvolutionSpec),
        ),
    ),
    tied=True,
    # Of training, and other names of settings that are read.
    without_effect=(
        *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu"),
        *("block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads"),
        "use_pos_enc",
    ),
)
