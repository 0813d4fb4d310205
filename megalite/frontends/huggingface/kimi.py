"""Kimi Linear: Kimi Delta Attention, and multi-latent attention without rotation in some layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megalite.config import ModelConfig
from megalite.config.model.recurrence import KimiDeltaSpec
from megalite.frontends.huggingface.deepseek import LATENT_ATTENTION, LATENT_SIZES, in_layers_of_experts
from megalite.frontends.huggingface.experts import (
    SHARED_WIDTH,
    WIDTH,
    biased_scores,
    expert_bias,
    expert_modules,
    experts,
    modules_with_some_experts,
    shared_expert_modules,
)
from megalite.frontends.huggingface.family import (
    Place,
    Transform,
    by_kind,
    in_layers_that,
    modules,
    with_kernel_dim,
)
from megalite.frontends.huggingface.llama import WITHOUT_MTP, llama_like
from megalite.frontends.huggingface.positions import recurrent_layers
from megalite.frontends.huggingface.settings import Fields, HFSettings, Rule, fixed, only, setting
from megalite.frontends.huggingface.sparse import layer_kinds
from megalite.utils.errors import UserError

_OF_LAYERS = "linear_attn_config"
"""Their object of sizes and layers of Kimi Delta Attention in published files."""
_BLOCK = "model.layers.{}.block_sparse_moe"
"""Their name of the MLP or the experts in files."""


def _usual_layers(hf: HFSettings, num_layers: int) -> list[bool]:
    sizes = hf.get(_OF_LAYERS) or {}
    listed, others = sizes.get("kda_layers"), sizes.get("full_attn_layers")
    if listed is not None or others is not None:
        if sorted([*(listed or ()), *(others or ())]) != [*range(1, num_layers + 1)]:
            raise UserError(
                f"{_OF_LAYERS} with kda_layers {listed} and full_attn_layers {others} cannot be converted: "
                f"together they must list the layers 1 to {num_layers}"
            )
        return [number + 1 in (listed or ()) for number in range(num_layers)]
    return [number == 0 or number % 4 != 0 for number in range(num_layers)]


def _read_sizes(hf: HFSettings, _: Fields) -> Fields:
    sizes = hf.get(_OF_LAYERS) or {}
    return {
        "linear_num_key_heads": sizes.get("num_heads", hf.get("linear_num_heads", 32)),
        "linear_key_head_dim": sizes.get("head_dim", hf.get("linear_head_dim", 128)),
        "linear_conv_kernel_dim": sizes.get("short_conv_kernel_size", hf.get("linear_conv_kernel_dim", 4)),
    }


def _write_sizes(config: ModelConfig) -> Fields:
    return {
        "linear_num_heads": config.linear_num_key_heads,
        "linear_head_dim": config.linear_key_head_dim,
        "linear_conv_kernel_dim": config.linear_conv_kernel_dim,
    }


_SHARED = "num_shared_experts n_shared_experts"


def _read_experts(hf: HFSettings, fields: Fields) -> Fields:
    groups = {"n_group": hf.get("num_expert_group", 1), "topk_group": hf.get("topk_group", 1)}
    chosen = biased_scores().read(HFSettings(groups, hf.kind), fields)
    return {**chosen, SHARED_WIDTH: hf[WIDTH] * hf.get(_SHARED, 1) or None}


def _write_experts(config: ModelConfig) -> Fields:
    width = config.moe_shared_expert_intermediate_size or 0
    return {
        "num_shared_experts": width // config.expert_ffn_size,
        "num_expert_group": config.moe_router_num_groups or 1,
        "topk_group": config.moe_router_group_topk or 1,
    }


def _rows(place: Place) -> tuple[int, Sequence[int]]:
    spec = _spec(place)
    return spec.num_heads, spec.group_rows


def _spec(place: Place) -> KimiDeltaSpec:
    assert place.layer is not None and isinstance(place.layer.mixer, KimiDeltaSpec)
    return place.layer.mixer


_HEADS = Transform(lambda full, _: [full.view(1, 1, -1, 1)], lambda parts, _: parts[0].flatten())
KIMI_LINEAR = replace(
    WITHOUT_MTP,
    model_type="kimi_linear",
    architecture="KimiLinearForCausalLM",
    rules=(
        only(hidden_act="silu", mla_use_nope=True, num_nextn_predict_layers=0, output_router_logits=False),
        *llama_like(1048576, 1e-5, rotary=fixed(position_embedding_type="none"), writes_head_dim=False),
        setting("model_max_length max_position_embeddings", "seq_length", 1048576),
        *LATENT_SIZES,
        layer_kinds("first_k_dense_replace"),
        in_layers_of_experts(
            only(moe_layer_freq=1, moe_renormalize=True, moe_router_activation_func="sigmoid"),
            *experts(
                "num_experts num_local_experts", topk="num_experts_per_token num_experts_per_tok", loss=None
            ),
            Rule(_read_experts, _write_experts, ("num_expert_group", "topk_group", *_SHARED.split())),
            setting("routed_scaling_factor", "moe_router_topk_scaling_factor", 2.446),
        ),
        recurrent_layers("kimi_delta_attention", _usual_layers, Rule(_read_sizes, _write_sizes)),
    ),
    layer=(
        *modules_with_some_experts(
            (
                replace(
                    module,
                    theirs=tuple(each.replace(".mlp.", ".block_sparse_moe.") for each in module.theirs),
                )
                for module in WITHOUT_MTP.layer
                if ".attention." not in module.ours
            ),
            (
                *expert_modules(_BLOCK, "w1", "w3", "w2"),
                *shared_expert_modules(f"{_BLOCK}.shared_experts"),
                *expert_bias(f"{_BLOCK}.gate.e_score_correction_bias"),
            ),
        ),
        *in_layers_that(
            lambda spec: spec.attention is not None,
            *(module for module in WITHOUT_MTP.layer if module.kind == "attention_output"),
            *LATENT_ATTENTION,
        ),
        *modules(
            "layers.{}.kimi_delta_attention.",
            "model.layers.{}.self_attn.",
            ("table", "in_projection", "q_proj k_proj v_proj b_proj", by_kind(_rows, apart=3)),
            (
                "table",
                "convolution",
                "q_conv1d k_conv1d v_conv1d",
                with_kernel_dim(
                    by_kind(lambda place: (_spec(place).num_heads, _spec(place).group_rows[:3]), apart=2)
                ),
            ),
            ("table", "decay_down", "f_a_proj"),
            ("table", "decay_up", "f_b_proj"),
            ("table", "gate_down", "g_a_proj"),
            ("table", "gate_up", "g_b_proj"),
            ("vector", "A_log", "A_log", _HEADS),
            ("vector", "dt_bias", "dt_bias"),
            ("table", "norm", "o_norm"),
            ("table", "projection", "o_proj"),
            only_in=lambda spec: isinstance(spec.mixer, KimiDeltaSpec),
        ),
    ),
    tied=None,
    # Of rotation, which it has not, a sum of sizes, and what transformers does not read.
    without_effect=(
        *("rope_parameters", "rope_scaling", "rope_theta", "qk_head_dim", "use_grouped_topk"),
        "tie_word_embeddings",
    ),
    other_names={".mlp.": ".block_sparse_moe.", "forget_gate.": ""},
    experts={"experts.gate_up_proj": ("w1", "w3"), "experts.down_proj": ("w2",)},
    joined={"conv1d.weight": tuple(f"{kind}_conv1d.weight" for kind in "qkv")},
)
