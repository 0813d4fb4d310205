"""Llama and the models whose tables are Llama's with a few other rows.

Dense ones are Mistral, Ministral 3, Qwen2, Qwen3, SmolLM3, OLMo 2 and OLMo 3. Those with experts in all
layers are Mixtral, OLMoE, MiniMax-M2 and GPT-OSS.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from megalite.config import ModelConfig
from megalite.frontends.huggingface.experts import (
    FUSED_EXPERTS,
    WEIGHTS_OF_CHOSEN,
    biased_scores,
    expert_bias,
    expert_modules,
    experts,
)
from megalite.frontends.huggingface.family import (
    HALVES,
    OUTPUT,
    QKV,
    VOCABULARY,
    Family,
    Parts,
    Place,
    Transform,
    modules,
)
from megalite.frontends.huggingface.positions import (
    WINDOWS,
    layer_types,
    one_window,
    read_rotary,
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
_USUAL_GATES = activation("hidden_act", "silu", HF_GATES)


def llama_like(
    positions: int = 2048,
    epsilon: float = 1e-6,
    *,
    rotary: Rule = _USUAL_POSITIONS,
    width: str = "intermediate_size",
    head_dim: int | None = None,
    writes_head_dim: bool = True,
    norm: str = "rms_norm_eps",
    function: Rule = _USUAL_GATES,
) -> tuple[Rule, ...]:
    """Return the rules that all descendants of Llama share.

    Args:
        positions, epsilon, head_dim: defaults of `max_position_embeddings`, `norm` and `head_dim`.
        rotary: rule of rotary positions.
        width: their name of the MLP's width.
        writes_head_dim: whether the family's heads may have another size than the usual one.
        norm: their name of the epsilon of norms.
        function: rule of the MLP's activation.
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
        setting(norm, "norm_epsilon", epsilon),
        function,
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
WITHOUT_MTP = replace(LLAMA, mtp=())
"""Llama's tables for families without multi-token prediction."""
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
OLMO_RULES = (
    biases(),
    fixed(norm_position="output", qk_layernorm=True, qk_layernorm_width="all_heads"),
)
OLMO2 = replace(
    LLAMA,
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    rules=(*llama_like(epsilon=1e-5, writes_head_dim=False), *OLMO_RULES),
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
        *OLMO_RULES,
        layer_types(full_every=4),
    ),
)


_WIDTH = "intermediate_size"
ATTENTION = tuple(module for module in LLAMA.layer if ".mlp." not in module.ours)
MIXTRAL = replace(
    LLAMA,
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    rules=(
        only(router_jitter_noise=0.0, output_router_logits=False),
        *llama_like(131072, 1e-5, rotary=rotary(1000000.0)),
        one_window(),
        *experts("num_local_experts", _WIDTH),
    ),
    layer=(*ATTENTION, *expert_modules("model.layers.{}.block_sparse_moe", "w1", "w3", "w2")),
    other_names={".mlp.": ".block_sparse_moe."},
    experts={"experts.gate_up_proj": ("w1", "w3"), "experts.down_proj": ("w2",)},
)
OLMOE = replace(
    LLAMA,
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    rules=(
        only(output_router_logits=False),
        *llama_like(4096, 1e-5, writes_head_dim=False),
        biases(),
        *experts("num_experts num_local_experts", _WIDTH),
        WEIGHTS_OF_CHOSEN,
        setting("clip_qkv", "clip_qkv", None),
        fixed(qk_layernorm=True, qk_layernorm_width="all_heads"),
    ),
    layer=(
        *ATTENTION,
        *QK_NORMS,
        *expert_modules("model.layers.{}.mlp"),
    ),
    experts=FUSED_EXPERTS,
)


def _check_attention_types(hf: HFSettings, _: Fields) -> Fields:
    hf.require(attn_type_list=[1] * hf["num_hidden_layers"])
    return {}


def _read_minimax_rotary(hf: HFSettings, fields: Fields) -> Fields:
    num_rotated, share = hf.get("rotary_dim"), hf.get("partial_rotary_factor", 1.0)
    return read_rotary(hf, 5000000.0, share if num_rotated is None else num_rotated / fields["kv_channels"])


def _write_minimax_rotary(config: ModelConfig) -> Fields:
    return {**rotary().write(config), "rotary_dim": int(config.head_dim * config.rotary_percent)}


MINIMAX_M2 = replace(
    MIXTRAL,
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    rules=(
        only(router_jitter_noise=0.0, output_router_logits=False, shared_intermediate_size=0),
        only(use_qk_norm=True, qk_norm_type="per_layer", use_routing_bias=True),
        Rule(_check_attention_types),
        *llama_like(196608, rotary=Rule(_read_minimax_rotary, _write_minimax_rotary), head_dim=128),
        *experts("num_local_experts num_experts", _WIDTH),
        Rule(biased_scores().read),
        fixed(qk_layernorm=True, qk_layernorm_width="all_heads"),
    ),
    layer=(
        *MIXTRAL.layer,
        *QK_NORMS,
        *expert_bias("model.layers.{}.block_sparse_moe.e_score_correction_bias"),
    ),
    # Settings of modules that the published files do not hold.
    without_effect=("use_mtp", "num_mtp_modules", "mtp_transformer_layers"),
    mtp=(),  # its files have other names for these modules
)

_GPT_OSS_ROTARY = {
    **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "original_max_position_embeddings": 4096,
}


def _check_precision(hf: HFSettings, _: Fields) -> Fields:
    if (quantized := hf.get("quantization_config")) is not None:
        raise UserError(
            f"gpt_oss with quantization_config {quantized.get('quant_method')} cannot be converted: only "
            "weights in bf16, fp16 or fp32 can"
        )
    return {}


def _read_gpt_oss_rotary(hf: HFSettings, _: Fields) -> Fields:
    current, old = hf.get("rope_parameters"), hf.get("rope_scaling")
    return rotary_fields(current or old or _GPT_OSS_ROTARY, hf.get("rope_theta") or 150000.0, None)


def _write_gpt_oss_rotary(config: ModelConfig) -> Fields:
    # Without rope_parameters, their rotary positions are scaled.
    parameters = {**scaling_of(config), "rope_theta": config.rotary_base}
    return {**rotary().write(config), "rope_parameters": parameters}


def _mix_halves(full: Tensor, _: Place) -> Parts:
    """Return ``[e, 2, ffn, ...]`` as ``[e, ..., 2 ffn]``, where gate and up take turns."""
    features_last = full.transpose(1, 2) if full.dim() == 3 else full.permute(0, 3, 2, 1)
    return [features_last.flatten(-2)]


def _part_halves(parts: Parts, _: Place) -> Tensor:
    apart = parts[0].unflatten(-1, (-1, 2))
    return apart.transpose(1, 2) if apart.dim() == 3 else apart.permute(0, 3, 2, 1)


_MIXED = Transform(_mix_halves, _part_halves)
_TRANSPOSED = Transform(lambda full, _: [full.mT], lambda parts, _: parts[0].mT)
HEAD_LOGITS = modules("layers.{}.", "model.layers.{}.", ("vector", "attention.sinks", "self_attn.sinks"))
"""Learned logits in attention's softmax."""
GPT_OSS = replace(
    LLAMA,
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    rules=(
        only(swiglu_alpha=1.702, hidden_act="silu", output_router_logits=False),
        Rule(_check_precision),
        *llama_like(131072, 1e-5, rotary=Rule(_read_gpt_oss_rotary, _write_gpt_oss_rotary)),
        *experts("num_local_experts num_experts", _WIDTH),
        Rule(lambda hf, _: {"activation": "quick_geglu"}, lambda config: {"hidden_act": "silu"}),
        setting("swiglu_limit", "activation_func_clamp_value", 7.0),
        fixed(glu_linear_offset=1.0, softmax_type="learnable"),
        biases(default=True, mlp=True),
        layer_types(full_every=2),
    ),
    layer=(
        *ATTENTION,
        *HEAD_LOGITS,
        *modules(
            "layers.{}.",
            "model.layers.{}.",
            ("mlp", "mlp.router", "mlp.router"),
            ("vector", "mlp.up.weight", "mlp.experts.gate_up_proj", _MIXED),
            ("vector", "mlp.up.bias", "mlp.experts.gate_up_proj_bias", _MIXED),
            ("vector", "mlp.down.weight", "mlp.experts.down_proj", _TRANSPOSED),
            ("vector", "mlp.down.bias", "mlp.experts.down_proj_bias"),
        ),
    ),
    # Other names of settings that are read.
    without_effect=("experts_per_token", "initial_context_length"),
    mtp=(),
)
