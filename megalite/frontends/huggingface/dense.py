"""Dense models with RMSNorm whose tables are Llama's with a few other rows.

Arcee and Seed-OSS have other biases and activations, Phi-3 and GLM fused projections, and GLM, ERNIE 4.5 and
Helium rotate neighboring elements. EXAONE 4 rotates only in layers with a window.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from megalite.config import ModelConfig
from megalite.frontends.huggingface.family import Module, Transform, by_kind, modules, qkv_groups
from megalite.frontends.huggingface.llama import HEAD_LOGITS, LLAMA, OLMO2, QK_NORMS, WITHOUT_MTP, llama_like
from megalite.frontends.huggingface.positions import (
    WINDOWS_AND_BASES,
    layer_types,
    one_window,
    rotary,
    rotary_fields,
    scaling_of,
    windows_with_rotation,
)
from megalite.frontends.huggingface.settings import (
    HF_ACTIVATIONS,
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

QKV_BIAS = ("attention_bias", "add_qkv_bias")
"""Their switch of biases of queries, keys and values alone, and ours."""
_MLP_BIAS = switch("mlp_bias", "add_mlp_bias", False, "has_mlp_bias")


def with_modules(layer: Iterable[Module], *rows: tuple[object, ...]) -> tuple[Module, ...]:
    """Return the modules of a layer with some of them replaced; see `modules` for the rows."""
    new = {module.ours: module for module in modules("layers.{}.", "model.layers.{}.", *rows)}
    return (*(module for module in layer if module.ours not in new), *new.values())


FINAL_LAYERNORM = tuple(
    replace(module, theirs=("model.final_layernorm",)) if module.ours == "final_norm" else module
    for module in LLAMA.ends
)
"""Modules outside of the layers where the last norm has this name."""
ARCEE = replace(
    WITHOUT_MTP,
    model_type="arcee",
    architecture="ArceeForCausalLM",
    rules=(*llama_like(4096, 1e-5, function=activation("hidden_act", "relu2")), biases(mlp=None)),
    layer=with_modules(LLAMA.layer, ("mlp", "mlp.up", "mlp.up_proj")),
)


SEED_OSS = replace(
    WITHOUT_MTP,
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    rules=(
        *llama_like(524288, head_dim=128),
        setting("attention_dropout", "attention_dropout", 0.1),
        hidden_dropout(None, "residual_dropout", 0.1),
        switch(*QKV_BIAS, True, "has_qkv_bias"),
        switch("attention_out_bias", "add_attention_output_bias", False, "has_attention_output_bias"),
        _MLP_BIAS,
    ),
)

_JOINED_QKV = by_kind(qkv_groups)
JOINED_ROWS = Transform(  # [2, ffn, h] to [2 ffn, h]
    lambda full, _: [full.flatten(0, 1)], lambda parts, _: parts[0].unflatten(0, (2, -1))
)
_JOINED_UP = ("mlp", "mlp.up", "mlp.gate_up_proj", JOINED_ROWS)


def _check_unscaled(hf: HFSettings, fields: Fields) -> Fields:
    if fields["rope_scaling"] != "none":  # transformers reads yarn as longrope, and refuses others
        raise UserError(
            f"{hf.kind} with rope_type {fields['rope_scaling']!r} cannot be converted: only default"
        )
    return {}


PHI3 = replace(
    WITHOUT_MTP,
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    rules=(
        *llama_like(4096, 1e-5, rotary=rotary(share=("partial_rotary_factor", 1.0)), writes_head_dim=False),
        Rule(_check_unscaled),
        hidden_dropout(None, "resid_pdrop"),
        one_window(),
    ),
    layer=with_modules(LLAMA.layer, ("qkv", "attention.qkv", "self_attn.qkv_proj", _JOINED_QKV), _JOINED_UP),
    without_effect=("original_max_position_embeddings", "embd_pdrop"),  # of scaled positions; never read
)
_GLM = (
    *llama_like(131072, 1.5625e-07, rotary=rotary(share=("partial_rotary_factor", 0.5)), head_dim=128),
    fixed(rotary_interleaved=True),
    switch(*QKV_BIAS, True, "has_qkv_bias"),
)
"""Rules of GLM and GLM-4."""
GLM = replace(
    WITHOUT_MTP,
    model_type="glm",
    architecture="GlmForCausalLM",
    rules=_GLM,
    layer=with_modules(LLAMA.layer, _JOINED_UP),
)
GLM4 = replace(
    GLM,
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    rules=(*_GLM, fixed(norm_position="sandwich")),
    layer=with_modules(
        GLM.layer,
        ("norm", "attention_output_norm", "post_self_attn_layernorm"),
        ("norm", "mlp_output_norm", "post_mlp_layernorm"),
    ),
)


def rounded(number: float) -> float:
    """Return a setting without the rounding errors of a power or a quotient, so that it is the same again."""
    short = float(f"{number:.12g}")
    return short if math.isclose(short, number, rel_tol=1e-14) else number


def factor_of(hf: HFSettings, name: str) -> float:
    """Return a setting that is a factor, 1 by default."""
    if not isinstance(value := hf.get(name, 1.0), (int, float)) or value <= 0:
        raise UserError(f"{hf.kind} with {name} {value} cannot be converted: numbers above 0 can")
    return value


def _read_scale(hf: HFSettings, fields: Fields) -> Fields:
    divisor = rounded(factor_of(hf, "attention_multiplier") ** -2)
    head_dim = fields.get("kv_channels") or fields["hidden_size"] // fields["num_attention_heads"]
    return {"query_pre_attn_scalar": None if divisor == head_dim else divisor}


MULTIPLIERS = (
    setting("embedding_multiplier", "embedding_multiplier", 1.0),
    setting("residual_multiplier", "residual_multiplier", 1.0),
    Rule(
        _read_scale,
        lambda config: {
            "attention_multiplier": rounded(config.squared_score_divisor(config.head_dim) ** -0.5)
        },
    ),
    Rule(
        lambda hf, _: {"logit_multiplier": 1.0 / factor_of(hf, "logits_scaling")},
        lambda config: {"logits_scaling": rounded(1.0 / config.logit_multiplier)},
    ),
)
"""Rules of Granite's four factors: of embeddings, outputs of blocks, scores and, as a divisor, logits."""
GRANITE = replace(
    WITHOUT_MTP,
    model_type="granite",
    architecture="GraniteForCausalLM",
    rules=(*LLAMA.rules, *MULTIPLIERS),
)
GRANITE_SWA = replace(
    GRANITE,
    model_type="granite_swa",
    architecture="GraniteSWAForCausalLM",
    rules=(
        *llama_like(8192, 1e-5),
        biases(mlp=None),
        *MULTIPLIERS,
        fixed(softmax_type="learnable"),
        WINDOWS_AND_BASES,
    ),
    layer=(
        *LLAMA.layer,
        *HEAD_LOGITS,
    ),
    tied=True,
)


def _read_hunyuan_rotary(hf: HFSettings, fields: Fields) -> Fields:
    settings = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    base = settings.get("rope_theta") or hf.get("rope_theta") or 10000.0
    if settings.get("rope_type", settings.get("type")) == "dynamic" and settings.get("alpha"):
        size = fields["kv_channels"] or fields["hidden_size"] // fields["num_attention_heads"]
        return rotary_fields({}, base * settings["alpha"] ** (size / (size - 2)), None)  # another base alone
    return rotary_fields(settings, base, None)


HUNYUAN_RULES = (
    *llama_like(2048, 1e-5, rotary=Rule(_read_hunyuan_rotary, rotary().write)),
    biases(),
    fixed(qk_layernorm=True, qk_layernorm_after_rope=True),
)
"""Rules of dense models and models with experts."""
HUNYUAN_QK_NORMS = modules(
    "layers.{}.attention.",
    "model.layers.{}.self_attn.",
    ("norm", "query_norm", "query_layernorm"),
    ("norm", "key_norm", "key_layernorm"),
)
HUNYUAN_V1_DENSE = replace(
    WITHOUT_MTP,
    model_type="hunyuan_v1_dense",
    architecture="HunYuanDenseV1ForCausalLM",
    rules=HUNYUAN_RULES,
    layer=(*LLAMA.layer, *HUNYUAN_QK_NORMS),
    without_effect=("eod_token_id",),
)


_APERTUS_ROTARY = {
    **{"rope_type": "llama3", "rope_theta": 12000000.0, "factor": 8.0, "low_freq_factor": 1.0},
    **{"original_max_position_embeddings": 8192, "high_freq_factor": 4.0},
}
"""Settings of a config without rotary positions."""


def _read_apertus_rotary(hf: HFSettings, _: Fields) -> Fields:
    settings = hf.get("rope_parameters") or hf.get("rope_scaling") or _APERTUS_ROTARY
    return rotary_fields(settings, hf.get("rope_theta") or 12000000.0, None)


def _write_apertus_rotary(config: ModelConfig) -> Fields:
    # Without rope_parameters, their rotary positions are scaled.
    return {"rope_parameters": {**scaling_of(config), "rope_theta": config.rotary_base}}


_XIELU = Transform(  # and two numbers that are constants here: a slope, and a bound
    lambda full, _: [full, full.new_tensor(0.5), full.new_tensor(-1e-6)], lambda parts, _: parts[0]
)
APERTUS = replace(
    WITHOUT_MTP,
    model_type="apertus",
    architecture="ApertusForCausalLM",
    rules=(
        only(mlp_bias=False, post_norm=False, qk_norm=True),
        *llama_like(
            65536,
            1e-5,
            rotary=Rule(_read_apertus_rotary, _write_apertus_rotary),
            function=activation("hidden_act", "xielu", {**HF_ACTIVATIONS, "xielu": "xielu"}),
        ),
        biases(),
        fixed(qk_layernorm=True),
    ),
    layer=(
        *with_modules(
            LLAMA.layer,
            ("norm", "attention_norm", "attention_layernorm"),
            ("norm", "mlp_norm", "feedforward_layernorm"),
            ("mlp", "mlp.up", "mlp.up_proj"),
        ),
        *QK_NORMS,
        *modules(
            "layers.{}.mlp.xielu.",
            "model.layers.{}.mlp.act_fn.",
            ("vector", "alpha_p", "alpha_p"),
            ("vector", "alpha_n", "alpha_n beta eps", _XIELU),
            only_if=lambda config: config.activation == "xielu",
        ),
    ),
)

ERNIE = (
    switch("use_bias", "add_bias_linear", False),
    fixed(rotary_interleaved=True, attention_dropout=0.0),  # whatever the config says
)
"""Rules of all ERNIE 4.5."""
ERNIE4_5 = replace(
    WITHOUT_MTP,
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    rules=(*llama_like(131072, 1e-5, rotary=rotary(500000.0), head_dim=128), *ERNIE),
    tied=True,
)
HELIUM = replace(
    WITHOUT_MTP,
    model_type="helium",
    architecture="HeliumForCausalLM",
    rules=(
        *llama_like(4096, 1e-8, rotary=rotary(100000.0), head_dim=128),
        # Their output projection maps hidden size to hidden size.
        Rule(write=lambda config: {"head_dim": config.hidden_size // config.num_attention_heads}),
        fixed(rotary_interleaved=True),
        switch(*QKV_BIAS, False, "has_qkv_bias"),
        _MLP_BIAS,
    ),
)
MINISTRAL = replace(
    WITHOUT_MTP,
    model_type="ministral",
    architecture="MinistralForCausalLM",
    rules=(only(attention_bias=False, mlp_bias=False), *llama_like(131072), layer_types(full_every=0)),
)

EXAONE4 = replace(
    OLMO2,
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    rules=(
        *llama_like(2048, 1e-5),
        fixed(norm_position="output", qk_layernorm=True),
        windows_with_rotation(4, "sliding_window_pattern", rotates_without=True),
    ),
    mtp=(),
)
