"""Models with experts in all layers and Llama's attention: Mixtral, OLMoE, MiniMax-M2 and GPT-OSS."""

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
from megalite.frontends.huggingface.family import Parts, Place, Transform, modules
from megalite.frontends.huggingface.llama import LLAMA, QK_NORMS, llama_like
from megalite.frontends.huggingface.positions import (
    layer_types,
    one_window,
    read_rotary,
    rotary,
    rotary_fields,
    scaling_of,
)
from megalite.frontends.huggingface.settings import Fields, HFSettings, Rule, biases, fixed, only, setting
from megalite.utils.errors import UserError

_WIDTH = "intermediate_size"
_ATTENTION = tuple(module for module in LLAMA.layer if ".mlp." not in module.ours)
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
    layer=(*_ATTENTION, *expert_modules("model.layers.{}.block_sparse_moe", "w1", "w3", "w2")),
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
        *_ATTENTION,
        *QK_NORMS,
        *expert_modules("model.layers.{}.mlp", "gate_proj", "up_proj", "down_proj"),
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
        *_ATTENTION,
        *modules(
            "layers.{}.",
            "model.layers.{}.",
            ("vector", "attention.sinks", "self_attn.sinks"),
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
