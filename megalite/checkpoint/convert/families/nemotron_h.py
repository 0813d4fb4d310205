"""transformers' Nemotron-H: layers of one block each, Mamba-2, attention, an MLP or experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megalite.checkpoint.convert.families import mamba, nemotron_experts
from megalite.checkpoint.convert.families.family import OUTPUT, QKV, VOCABULARY, Family, Module
from megalite.checkpoint.convert.families.hf_settings import THEIR_ACTIVATIONS, HFSettings
from megalite.checkpoint.convert.model_settings import none_if_default
from megalite.config import LayerKind, ModelConfig


def _read(hf: HFSettings) -> dict[str, Any]:
    hf.require("nemotron_h", attention_bias=False, sliding_window=None, num_nextn_predict_layers=0)
    pattern = mamba.read_pattern(hf)
    if "E" in pattern:
        hf.require("nemotron_h with experts", mlp_bias=False)  # their routed experts would have no biases
    else:
        hf.names_read.update(nemotron_experts.SETTINGS)
    hidden, heads = hf["hidden_size"], hf["num_attention_heads"]
    return {
        "num_layers": len(pattern),
        "hybrid_override_pattern": pattern,
        "hidden_size": hidden,
        "ffn_hidden_size": hf["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": none_if_default(hf.get("num_key_value_heads"), heads),
        "kv_channels": none_if_default(hf.get("head_dim", 128), hidden // heads),
        **mamba.read_mamba(hf),
        **(nemotron_experts.read_nemotron_experts(hf) if "E" in pattern else {}),
        "seq_length": hf.get("max_position_embeddings", 4096),
        "vocab_size": hf["vocab_size"],
        "position_embedding_type": "none",
        "normalization": "RMSNorm",
        "norm_epsilon": hf.get("layer_norm_epsilon", 1e-5),
        "activation": hf.activation("mlp_hidden_act", "relu2"),
        "add_bias_linear": False,
        "add_mlp_bias": hf.switch("mlp_bias", False),
        "untie_embeddings_and_output_weights": True,  # theirs are never tied, whatever tie_word_embeddings is
        "hidden_dropout": hf.get("hidden_dropout", 0.0),
        "attention_dropout": hf.get("attention_dropout", 0.0),
        "init_method_std": hf.get("initializer_range", 0.02),
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        **mamba.write_pattern(config),
        **mamba.write_mamba(config),
        **(nemotron_experts.write_nemotron_experts(config) if config.has_experts else {}),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.num_positions,
        "layer_norm_epsilon": config.norm_epsilon,
        "mlp_hidden_act": THEIR_ACTIVATIONS.get(config.activation, "relu2"),
        "mlp_bias": config.has_mlp_bias,
        "hidden_dropout": config.hidden_dropout,
        "attention_dropout": config.attention_dropout,
    }


# Attention is not rotated, whatever the settings of rotary positions are.
_WITHOUT_EFFECT = """
    chunk_size expand mamba_proj_bias mamba_ssm_cache_dtype num_hidden_layers num_logits_to_keep
    output_router_logits rescale_prenorm_residual residual_in_fp32 rms_norm_eps tie_word_embeddings
    time_step_floor time_step_limit time_step_max time_step_rank use_mamba_kernels mtp_layers_block_type
    moe_shared_expert_overlap norm_eps partial_rotary_factor rope_theta
"""
_LAYER = "backbone.layers.{}."


def _has_attention(kind: LayerKind) -> bool:
    return kind.mixer == "attention"


def _is_dense(kind: LayerKind) -> bool:
    return kind.has_mlp and not kind.has_experts


def _projection(kind: Any, ours: str, theirs: str, only_in: Callable[[LayerKind], bool]) -> Module:
    return Module(kind, f"layers.{{}}.{ours}", (f"{_LAYER}mixer.{theirs}_proj",), only_in=only_in)


_NORM, _QKV = (_LAYER + "norm",), tuple(f"{_LAYER}mixer.{part}_proj" for part in "qkv")
NEMOTRON_H = Family(
    "nemotron_h",
    "NemotronHForCausalLM",
    "backbone.",
    ("lm_head.",),
    _read,
    _write,
    (
        Module("table", "embedding.word", ("backbone.embeddings",), VOCABULARY),
        Module("norm", "final_norm", ("backbone.norm_f",)),
        OUTPUT,
    ),
    (
        Module(
            "norm", "layers.{}.attention_norm", (_LAYER + "norm",), only_in=lambda kind: kind.mixer != "none"
        ),
        Module("norm", "layers.{}.mlp_norm", (_LAYER + "norm",), only_in=lambda kind: kind.has_mlp),
        *mamba.mamba_modules(_LAYER + "mixer"),
        Module("qkv", "layers.{}.attention.qkv", _QKV, QKV, only_in=_has_attention),
        _projection("attention_output", "attention.projection", "o", _has_attention),
        _projection("mlp", "mlp.up", "up", _is_dense),
        _projection("mlp", "mlp.down", "down", _is_dense),
        *nemotron_experts.nemotron_expert_modules(_LAYER + "mixer"),
    ),
    without_effect=tuple(_WITHOUT_EFFECT.split()),
    experts={"experts.up_proj": ("up_proj",), "experts.down_proj": ("down_proj",)},
    other_names={"model.": "backbone."},  # transformers 5 has another name than its files
)
