"""transformers' GPT-OSS: experts with biases, attention sinks, and a window in every other layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from megalite.checkpoint.convert.families.biases import read_biases, write_biases
from megalite.checkpoint.convert.families.experts import read_experts, write_experts
from megalite.checkpoint.convert.families.family import Module, Parts, Transform
from megalite.checkpoint.convert.families.hf_settings import HFSettings
from megalite.checkpoint.convert.families.llama import LLAMA, read_llama_like, write_llama_like
from megalite.checkpoint.convert.families.rotary import rotary_fields, scaling_of
from megalite.checkpoint.convert.families.windows import read_layer_types, write_layer_types
from megalite.config import ModelConfig
from megalite.errors import UserError

_EXPERTS, _WIDTH = "num_local_experts", "intermediate_size"
_ROTARY = {
    **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "original_max_position_embeddings": 4096,
}


def _read(hf: HFSettings) -> dict[str, Any]:
    if (quantized := hf.get("quantization_config")) is not None:
        raise UserError(
            f"gpt_oss with quantization_config {quantized.get('quant_method')} cannot be converted: only "
            "weights in bf16, fp16 or fp32 can"
        )
    hf.require("gpt_oss", swiglu_alpha=1.702, hidden_act="silu", output_router_logits=False)
    current, old = hf.get("rope_parameters"), hf.get("rope_scaling")
    rotary = rotary_fields(current or old or _ROTARY, hf.get("rope_theta") or 150000.0, None)
    fields = {
        **read_llama_like(hf, positions=131072, epsilon=1e-5, rotary=rotary),
        **read_experts(hf, (_EXPERTS, "num_experts"), _WIDTH),
        "activation": "quick_geglu",
        "activation_func_clamp_value": hf.get("swiglu_limit", 7.0),
        "glu_linear_offset": 1.0,
        "softmax_type": "learnable",
        **read_biases(hf, default=True, mlp=True),
    }
    return {**fields, **read_layer_types(hf, fields, full_every=2)}


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_llama_like(config),
        **write_layer_types(config),
        **write_experts(config, _EXPERTS, _WIDTH),
        # Without this, their rotary positions are scaled.
        "rope_parameters": {**scaling_of(config), "rope_theta": config.rotary_base},
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "swiglu_limit": config.activation_func_clamp_value,
        **write_biases(config),
    }


def _mix_halves(full: Tensor, _: ModelConfig) -> Parts:
    """Return ``[e, 2, ffn, ...]`` as ``[e, ..., 2 ffn]``, where gate and up take turns."""
    features_last = full.transpose(1, 2) if full.dim() == 3 else full.permute(0, 3, 2, 1)
    return [features_last.flatten(-2)]


def _part_halves(parts: Parts, _: ModelConfig) -> Tensor:
    apart = parts[0].unflatten(-1, (-1, 2))
    return apart.transpose(1, 2) if apart.dim() == 3 else apart.permute(0, 3, 2, 1)


_MIXED = Transform(_mix_halves, _part_halves)
_TRANSPOSED = Transform(lambda full, _: [full.mT], lambda parts, _: parts[0].mT)
_MLP = "model.layers.{}.mlp."
GPT_OSS = replace(
    LLAMA,
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    read=_read,
    write=_write,
    layer=(
        *(module for module in LLAMA.layer if ".mlp." not in module.ours),
        Module("vector", "layers.{}.attention.sinks", ("model.layers.{}.self_attn.sinks",)),
        Module("mlp", "layers.{}.mlp.router", (_MLP + "router",)),
        Module("vector", "layers.{}.mlp.up.weight", (_MLP + "experts.gate_up_proj",), _MIXED),
        Module("vector", "layers.{}.mlp.up.bias", (_MLP + "experts.gate_up_proj_bias",), _MIXED),
        Module("vector", "layers.{}.mlp.down.weight", (_MLP + "experts.down_proj",), _TRANSPOSED),
        Module("vector", "layers.{}.mlp.down.bias", (_MLP + "experts.down_proj_bias",)),
    ),
    # The first two are other names of settings that are read.
    without_effect=("experts_per_token", "initial_context_length", "swiglu_alpha"),
    mtp=(),
)
