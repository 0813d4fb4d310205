"""Llama and the dense models whose tables are Llama's with a few other rows.

They are Mistral, Ministral 3, Qwen2, Qwen3, SmolLM3, OLMo 2 and OLMo 3.
"""

from __future__ import annotations

from dataclasses import replace

from megalite.config import ModelConfig
from megalite.frontends.huggingface.family import HALVES, OUTPUT, QKV, VOCABULARY, Family, modules
from megalite.frontends.huggingface.positions import (
    WINDOWS,
    layer_types,
    one_window,
    rotary,
    rotary_by_layer,
    rotary_fields,
    scaling_of,
)
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
)
from megalite.utils.errors import UserError

_USUAL_POSITIONS = rotary()


def llama_like(
    positions: int = 2048,
    epsilon: float = 1e-6,
    *,
    rotary: Rule = _USUAL_POSITIONS,
    width: str = "intermediate_size",
    head_dim: int | None = None,
    writes_head_dim: bool = True,
) -> tuple[Rule, ...]:
    """Return the rules that all descendants of Llama share.

    Args:
        positions, epsilon, head_dim: defaults of `max_position_embeddings`, `rms_norm_eps` and `head_dim`.
        rotary: rule of rotary positions.
        width: their name of the MLP's width.
        writes_head_dim: whether the family's heads may have another size than the usual one.
    """
    heads = setting("head_dim", "kv_channels", head_dim)
    return (
        setting("num_hidden_layers", "num_layers"),
        setting("hidden_size", "hidden_size"),
        setting(width, "ffn_hidden_size"),
        setting("num_attention_heads", "num_attention_heads"),
        setting("num_key_value_heads", "num_query_groups", None),
        heads if writes_head_dim else Rule(heads.read),
        setting("max_position_embeddings", "seq_length", positions),
        rotary,
        setting("rms_norm_eps", "norm_epsilon", epsilon),
        activation("hidden_act", "silu", HF_GATES),
        setting("attention_dropout", "attention_dropout", 0.0),
        fixed(normalization="RMSNorm", add_bias_linear=False, hidden_dropout=0.0),
    )


LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    (*llama_like(), biases(mlp=None)),
    (
        *modules(
            "",
            "model.",
            ("table", "embedding.word", "embed_tokens", VOCABULARY),
            ("norm", "final_norm", "norm"),
        ),
        OUTPUT,
    ),
    modules(
        "layers.{}.",
        "model.layers.{}.",
        ("norm", "attention_norm", "input_layernorm"),
        ("qkv", "attention.qkv", "self_attn.q_proj self_attn.k_proj self_attn.v_proj", QKV),
        ("attention_output", "attention.projection", "self_attn.o_proj"),
        ("norm", "mlp_norm", "post_attention_layernorm"),
        ("mlp", "mlp.up", "mlp.gate_proj mlp.up_proj", HALVES),
        ("mlp", "mlp.down", "mlp.down_proj"),
    ),
    mtp=modules(  # {} is the number of the layer
        "mtp.{}.",
        "model.layers.{}.",
        ("norm", "embedding_norm", "enorm"),
        ("norm", "hidden_norm", "hnorm"),
        ("table", "projection", "eh_proj"),
        ("norm", "final_norm", "shared_head.norm"),
    ),
)
QK_NORMS = modules(
    "layers.{}.attention.",
    "model.layers.{}.self_attn.",
    ("norm", "query_norm", "q_norm"),
    ("norm", "key_norm", "k_norm"),
)
"""Norms of queries and keys."""

MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    architecture="MistralForCausalLM",
    rules=(only(attention_bias=False, mlp_bias=False), *llama_like(131072), one_window(4096)),
)

_BETA = "llama_4_scaling_beta"
_MINISTRAL_ROTARY = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    _BETA: 0.1,
}
"""Settings of a config without rotary positions."""


def _read_scaled_queries(hf: HFSettings, _: Fields) -> Fields:
    settings = dict(hf.get("rope_parameters") or _MINISTRAL_ROTARY)
    beta = settings.pop(_BETA, None)
    if beta is None:
        raise UserError(f"ministral3 without {_BETA} in rope_parameters cannot be converted")
    settings.pop("max_position_embeddings", None)  # transformers does not read this copy
    fields = rotary_fields(settings, 1000000.0, None)
    if fields["rope_scaling"] != "yarn":
        raise UserError(
            f"ministral3 with rope_type {settings.get('rope_type')!r}: only yarn can be converted"
        )
    return {**fields, "llama_4_scaling_beta": float(beta)}


def _write_scaled_queries(config: ModelConfig) -> Fields:
    # The family always has both: a model without them differs in what is read.
    scaling = scaling_of(replace(config, rope_scaling="yarn"))
    beta = _MINISTRAL_ROTARY[_BETA] if config.llama_4_scaling_beta is None else config.llama_4_scaling_beta
    return {"rope_parameters": {**scaling, "rope_theta": config.rotary_base, _BETA: beta}}


MINISTRAL3 = replace(
    LLAMA,
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    rules=(
        only(attention_bias=False, mlp_bias=False),
        *llama_like(262144, 1e-5, rotary=Rule(_read_scaled_queries, _write_scaled_queries)),
        one_window(),
    ),
)
QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    rules=(
        only(mlp_bias=False),
        *llama_like(32768, writes_head_dim=False),
        fixed(add_qkv_bias=True),
        WINDOWS,
    ),
    without_effect=("use_mrope",),  # of the family's models for images
)
QWEN3_RULES = (
    only(mlp_bias=False),
    *llama_like(32768, head_dim=128),
    biases(),
    fixed(qk_layernorm=True),
)
"""Rules of dense models and models with experts."""
QWEN3 = replace(
    LLAMA,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    rules=(*QWEN3_RULES, WINDOWS),
    layer=(*LLAMA.layer, *QK_NORMS),
)


def _read_unrotated(hf: HFSettings, fields: Fields) -> Fields:
    every, layers = hf.get("no_rope_layer_interval", 4), range(fields["num_layers"])
    rotated = hf.get("no_rope_layers") or [int((layer + 1) % every != 0) for layer in layers]
    unrotated = tuple(int(not rotated[layer]) for layer in layers)
    return {"no_rope_freq": unrotated if any(unrotated) else None}


def _write_unrotated(config: ModelConfig) -> Fields:
    attention = (spec.attention for spec in config.layer_specs)
    return {"no_rope_layers": [int(spec is not None and spec.rotary is not None) for spec in attention]}


SMOLLM3 = replace(
    LLAMA,
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    rules=(
        *llama_like(32768, rotary=rotary(2000000.0), writes_head_dim=False),
        biases(mlp=None),
        Rule(_read_unrotated, _write_unrotated),
        WINDOWS,
    ),
    tied=True,
)
_OLMO = (
    biases(),
    fixed(norm_position="output", qk_layernorm=True, qk_layernorm_width="all_heads"),
)
OLMO2 = replace(
    LLAMA,
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    rules=(*llama_like(epsilon=1e-5, writes_head_dim=False), *_OLMO),
    layer=(
        *(module for module in LLAMA.layer if module.kind != "norm"),
        *modules(
            "layers.{}.",
            "model.layers.{}.",
            ("norm", "attention_norm", "post_attention_layernorm"),
            ("norm", "mlp_norm", "post_feedforward_layernorm"),
        ),
        *QK_NORMS,
    ),
)
OLMO3 = replace(
    OLMO2,
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    rules=(
        *llama_like(epsilon=1e-5, rotary=rotary_by_layer(500000.0), writes_head_dim=False),
        *_OLMO,
        layer_types(full_every=4),
    ),
)
