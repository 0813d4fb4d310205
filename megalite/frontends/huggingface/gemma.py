"""Gemma, Gemma 2, Gemma 3 and Gemma 4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megalite.config import LayerSpec, ModelConfig
from megalite.frontends.huggingface.experts import JOINED_HALVES, experts, has_experts
from megalite.frontends.huggingface.family import (
    VOCABULARY,
    Place,
    by_kind,
    in_layers_that,
    modules,
    qkv_groups,
)
from megalite.frontends.huggingface.llama import LLAMA, QK_NORMS, WITHOUT_MTP, llama_like
from megalite.frontends.huggingface.positions import FULL, layer_types, rotary_by_layer
from megalite.frontends.huggingface.settings import (
    HF_GATES,
    Fields,
    HFSettings,
    Rule,
    activation,
    biases,
    fixed,
    only,
    setting,
    where,
)
from megalite.utils.errors import UserError


def _read_causal(hf: HFSettings, _: Fields) -> Fields:
    if hf.get("use_bidirectional_attention"):
        raise UserError(f"{hf.kind} with use_bidirectional_attention cannot be converted")
    return {}


ROOT_OF_WIDTH = Rule(lambda hf, fields: {"embedding_multiplier": fields["hidden_size"] ** 0.5})
"""Rule of token embeddings that are multiplied by the square root of the hidden size."""
GEMMA = replace(
    WITHOUT_MTP,
    model_type="gemma",
    architecture="GemmaForCausalLM",
    rules=(
        *llama_like(
            8192,
            head_dim=256,
            # In early files, gelu means its approximation.
            function=activation("hidden_act", "gelu_pytorch_tanh", {**HF_GATES, "gelu": "geglu"}),
        ),
        biases(),
        ROOT_OF_WIDTH,
        Rule(_read_causal),
        fixed(zero_centered_norms=True),
    ),
    tied=True,
    without_effect=("hidden_activation",),
)
_GEMMA = (
    biases(),
    fixed(norm_position="sandwich"),
    activation("hidden_activation", "gelu_pytorch_tanh", HF_GATES),
    ROOT_OF_WIDTH,
)
"""Rules of Gemma 2 to 4."""
_SCALED = (
    Rule(_read_causal),
    fixed(zero_centered_norms=True),
    Rule(
        lambda hf, _: {"query_pre_attn_scalar": hf.get("query_pre_attn_scalar", 256)},
        lambda config: {"query_pre_attn_scalar": int(config.query_pre_attn_scalar or config.head_dim)},
    ),
)
"""Rules of Gemma 2 and 3."""
_ATTENTION_CAP = "attn_logit_softcapping"
GEMMA2 = replace(
    LLAMA,
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    rules=(
        *llama_like(8192, head_dim=256),
        *_GEMMA,
        *_SCALED,
        setting(_ATTENTION_CAP, _ATTENTION_CAP, 50.0),
        setting("final_logit_softcapping", "final_logit_softcapping", 30.0),
        layer_types(full_every=2),
    ),
    layer=(
        *(module for module in LLAMA.layer if module.kind != "norm"),
        *modules(
            "layers.{}.",
            "model.layers.{}.",
            ("norm", "attention_norm", "input_layernorm"),
            ("norm", "attention_output_norm", "post_attention_layernorm"),
            ("norm", "mlp_norm", "pre_feedforward_layernorm"),
            ("norm", "mlp_output_norm", "post_feedforward_layernorm"),
        ),
    ),
    tied=True,
    without_effect=("cache_implementation",),
)
GEMMA3 = replace(
    GEMMA2,
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    rules=(
        only(attn_logit_softcapping=None),  # transformers' model ignores it
        Rule(write=lambda config: {_ATTENTION_CAP: config.attn_logit_softcapping}),
        *llama_like(131072, rotary=rotary_by_layer(1000000.0, 10000.0, "rope_local_base_freq"), head_dim=256),
        *_GEMMA,
        *_SCALED,
        fixed(qk_layernorm=True),
        setting("final_logit_softcapping", "final_logit_softcapping", None),
        layer_types(6, "sliding_window_pattern"),
    ),
    layer=(*GEMMA2.layer, *QK_NORMS),
    without_effect=(*GEMMA2.without_effect, "_sliding_window_pattern"),
)


def _read_heads(hf: HFSettings, _: Fields) -> Fields:
    """Return our fields of attention heads; `per_layer_config` has the sizes of layers that differ."""
    as_values = hf.switch("attention_k_eq_v", False)
    own = {"head_dim": hf.get("global_head_dim", 512)}
    if as_values and hf.get("num_global_key_value_heads") is not None:
        own["num_key_value_heads"] = hf["num_global_key_value_heads"]
    by_layer, types = hf.get("per_layer_config"), hf.get("layer_types")
    if by_layer is not None and types is not None:
        full = {number for number, kind in enumerate(types) if kind == FULL}
        own = next(iter(by_layer.values()), {})
        if any(each != own for each in by_layer.values()) or {*map(int, by_layer)} not in (full, set()):
            raise UserError(
                f"gemma4_text with other sizes than one for all layers of {FULL} cannot be converted"
            )
    return {
        "full_attention_kv_channels": own.get("head_dim"),
        "full_attention_query_groups": own.get("num_key_value_heads"),
        "keys_as_values": "full_attention" if as_values else "none",
    }


def _write_heads(config: ModelConfig) -> Fields:
    return {
        "global_head_dim": config.full_attention_kv_channels or config.head_dim,
        "num_global_key_value_heads": config.full_attention_query_groups,
        "attention_k_eq_v": config.keys_as_values != "none",
    }


def _read_embeddings(hf: HFSettings, _: Fields) -> Fields:
    size = hf.get("hidden_size_per_layer_input", 256) or None
    if size is not None:
        hf.require_equal("vocab_size_per_layer_input", "vocab_size", 262144)
    if hf.get("use_bidirectional_attention") not in (None, "vision"):  # text is causal with "vision"
        raise UserError("gemma4_text with use_bidirectional_attention all cannot be converted")
    return {"hidden_size_per_layer_input": size}


def _write_embeddings(config: ModelConfig) -> Fields:
    return {
        "hidden_size_per_layer_input": config.hidden_size_per_layer_input or 0,
        "vocab_size_per_layer_input": config.vocab_size,
    }


def _read_double_width(hf: HFSettings, fields: Fields) -> Fields:
    is_double = hf.switch("use_double_wide_mlp", False)
    return {"kv_shared_ffn_hidden_size": 2 * fields["ffn_hidden_size"] if is_double else None}


_TYPES = layer_types(full_every=6)


def _read_types(hf: HFSettings, fields: Fields) -> Fields:
    """Return the windows, or the sizes of full attention in all layers of a model without windows."""
    if windows := _TYPES.read(hf, fields):
        return windows
    groups = fields["full_attention_query_groups"]
    return {
        "kv_channels": fields["full_attention_kv_channels"],
        "num_query_groups": fields["num_query_groups"] if groups is None else groups,
        "full_attention_kv_channels": None,
        "full_attention_query_groups": None,
        "keys_as_values": "all" if fields["keys_as_values"] == "full_attention" else "none",
    }


def _query_key_groups(place: Place) -> tuple[int, Sequence[int]]:
    groups, rows = qkv_groups(place)
    return groups, rows[:2]


def _has_keys_as_values(spec: LayerSpec) -> bool:
    return spec.attention is not None and spec.attention.keys_as_values


def _has_keys(spec: LayerSpec) -> bool:
    return spec.attention is not None and spec.attention.key_source is None


def _has_embeddings(config: ModelConfig) -> bool:
    return config.hidden_size_per_layer_input is not None


_LAYER, _THEIR_LAYER = "layers.{}.", "model.layers.{}."
_QUERY_KEYS = ("qkv", "attention.qkv", "self_attn.q_proj self_attn.k_proj", by_kind(_query_key_groups, 1))
GEMMA4 = replace(
    GEMMA2,
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    rules=(
        Rule(_read_embeddings, _write_embeddings),
        *llama_like(131072, rotary=rotary_by_layer(1000000.0, 10000.0, in_old_files=False), head_dim=256),
        *_GEMMA,
        Rule(_read_heads, _write_heads),
        setting("num_kv_shared_layers", "num_kv_shared_layers", 0),
        Rule(
            _read_double_width,
            lambda config: {"use_double_wide_mlp": config.kv_shared_ffn_hidden_size == 2 * config.ffn_size},
        ),
        where(  # beside the MLPs
            lambda hf, _: hf.switch("enable_moe_block", False),
            lambda config: config.has_experts,
            Rule(write=lambda config: {"enable_moe_block": True}),
            fixed(moe_beside_mlp=True),
            *experts("num_experts", topk="top_k_experts", loss=None),
        ),
        fixed(qk_layernorm=True, value_layernorm=True, layer_output_scale=True, query_pre_attn_scalar=1),
        setting("final_logit_softcapping", "final_logit_softcapping", None),
        Rule(_read_types, _TYPES.write),
    ),
    ends=(
        *GEMMA2.ends,
        *modules(
            "embedding.",
            "model.",
            ("table", "layer_table", "embed_tokens_per_layer", VOCABULARY),
            ("table", "layer_projection", "per_layer_model_projection"),
            ("norm", "layer_norm", "per_layer_projection_norm"),
            only_if=_has_embeddings,
        ),
    ),
    layer=(
        *(module for module in GEMMA2.layer if module.kind != "qkv"),
        *in_layers_that(
            lambda spec: _has_keys(spec) and not _has_keys_as_values(spec),
            *(module for module in GEMMA2.layer if module.kind == "qkv"),
        ),
        *modules(_LAYER, _THEIR_LAYER, _QUERY_KEYS, only_in=_has_keys_as_values),
        *modules(
            _LAYER,
            _THEIR_LAYER,
            ("qkv", "attention.qkv", "self_attn.q_proj"),
            only_in=lambda spec: not _has_keys(spec),
        ),
        QK_NORMS[0],
        *in_layers_that(_has_keys, QK_NORMS[1]),
        *modules(
            _LAYER,
            _THEIR_LAYER,
            ("table", "experts.router", "router.proj"),
            ("vector", "experts.router.scale", "router.scale"),
            ("vector", "experts.router.expert_scale", "router.per_expert_scale"),
            ("vector", "experts.up.weight", "experts.gate_up_proj", JOINED_HALVES),
            ("vector", "experts.down.weight", "experts.down_proj"),
            ("norm", "experts.input_norm", "pre_feedforward_layernorm_2"),
            ("norm", "experts.output_norm", "post_feedforward_layernorm_2"),
            ("norm", "mlp_own_norm", "post_feedforward_layernorm_1"),
            only_in=has_experts,
        ),
        *modules(_LAYER, _THEIR_LAYER, ("vector", "output_scale.weight", "layer_scalar")),
        *modules(
            _LAYER,
            _THEIR_LAYER,
            ("table", "embedding_gate.gate", "per_layer_input_gate"),
            ("table", "embedding_gate.projection", "per_layer_projection"),
            ("norm", "embedding_gate.norm", "post_per_layer_input_norm"),
            only_if=_has_embeddings,
        ),
    ),
    without_effect=("vocab_size_per_layer_input",),
)
