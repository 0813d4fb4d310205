"""Qwen2-MoE and Qwen3-MoE, and the Qwen with Gated DeltaNet: Qwen3-Next, Qwen3.5 and Qwen3.5-MoE.

The rows of two projections of Gated DeltaNet are grouped by key head; those of four are queries, keys and
values, gates, rates, and decays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megalite.config import ModelConfig
from megalite.config.model.recurrence import DeltaNetSpec
from megalite.frontends.huggingface.experts import (
    FUSED_EXPERTS,
    SHARED_WIDTH,
    WEIGHTS_OF_CHOSEN,
    WIDTH,
    expert_modules,
    experts,
    modules_with_some_experts,
    shared_expert_modules,
)
from megalite.frontends.huggingface.family import (
    Module,
    Parts,
    Place,
    Transform,
    by_kind,
    in_layers_that,
    modules,
    with_kernel_dim,
    with_parts_joined,
)
from megalite.frontends.huggingface.llama import LLAMA, QWEN3, QWEN3_RULES, llama_like
from megalite.frontends.huggingface.positions import (
    WINDOWS,
    one_window,
    recurrent_layers,
    rotary,
    rotary_fields,
)
from megalite.frontends.huggingface.settings import (
    Fields,
    HFSettings,
    Rule,
    biases,
    fixed,
    only,
    setting,
    switch,
    where,
)
from megalite.utils.errors import UserError

_MLP = "model.layers.{}.mlp"
_EXPERTS = expert_modules(_MLP)
_GATED_EXPERTS = (
    *_EXPERTS,
    *shared_expert_modules(f"{_MLP}.shared_expert"),
    *modules("layers.{}.mlp.", f"{_MLP}.", ("table", "shared.gate", "shared_expert_gate")),
)
"""Modules of a layer with experts, without and with a shared one."""


_EXPERT_RULES = (only(output_router_logits=False), *experts("num_experts num_local_experts"))
_SHARED_EXPERT_RULES = (
    setting("shared_expert_intermediate_size", SHARED_WIDTH),
    fixed(moe_shared_expert_gate=True),
)


def _in_some_layers(*rules: Rule) -> tuple[Rule, Rule]:
    """Return the rules of Qwen's experts, which some layers or models may not have."""

    def marks(hf: HFSettings, fields: Fields) -> tuple[int, ...]:
        step, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or ()
        has_any, layers = hf["num_experts num_local_experts"] > 0, range(fields["num_layers"])
        return tuple(int(has_any and (layer + 1) % step == 0 and layer not in dense) for layer in layers)

    def read(hf: HFSettings, fields: Fields) -> Fields:
        found = marks(hf, fields)
        return {"moe_layer_freq": None if all(found) else found}

    def write(config: ModelConfig) -> Fields:
        specs = enumerate(config.layer_specs)
        return {"mlp_only_layers": [number for number, spec in specs if spec.experts is None]}

    return (
        Rule(write=lambda _: {"num_experts": 0, "mlp_only_layers": [], "decoder_sparse_step": 1}),
        where(
            lambda hf, fields: any(marks(hf, fields)),
            lambda config: config.has_experts,
            *rules,
            Rule(read, write),
        ),
    )


def _check_types(hf: HFSettings, _: Fields) -> Fields:
    if hf.get("use_sliding_window", False) and hf.get("layer_types") is None:
        raise UserError("qwen2_moe with use_sliding_window cannot be converted without layer_types")
    return {}


QWEN2_MOE = replace(
    LLAMA,
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    rules=(
        *llama_like(32768),
        Rule(_check_types),
        WINDOWS,
        *_in_some_layers(*_EXPERT_RULES, *_SHARED_EXPERT_RULES, WEIGHTS_OF_CHOSEN),
        switch("qkv_bias", "add_qkv_bias", True, "has_qkv_bias"),
    ),
    layer=modules_with_some_experts(LLAMA.layer, _GATED_EXPERTS),
    experts=FUSED_EXPERTS,
)
QWEN3_MOE = replace(
    QWEN3,
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    rules=(*QWEN3_RULES, one_window(switched=True), *_in_some_layers(*_EXPERT_RULES, WEIGHTS_OF_CHOSEN)),
    layer=modules_with_some_experts(QWEN3.layer, _EXPERTS),
    experts=FUSED_EXPERTS,
)

DELTA_NET_SIZES = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
"""Sizes of Gated DeltaNet, which have the same names here and there, with their defaults."""


def _every_nth_has_attention(hf: HFSettings, num_layers: int) -> list[bool]:
    every = hf.get("full_attention_interval", 4)
    return [(number + 1) % every != 0 for number in range(num_layers)]


def _hybrid(positions: Rule, width: str = "intermediate_size") -> tuple[Rule, ...]:
    """Return the rules that Qwen3-Next and Qwen3.5 share; `width` is their name of the MLP's width."""
    return (
        *llama_like(32768, rotary=positions, width=width, head_dim=256),
        biases(),
        recurrent_layers(
            "gated_delta_net",
            _every_nth_has_attention,
            *(setting(name, name, usual) for name, usual in DELTA_NET_SIZES.items()),
        ),
        fixed(qk_layernorm=True, zero_centered_norms=True, attention_output_gate=True),
    )


def delta_net_modules(
    in_projections: str,
    grouping: Transform,
    convolutions: str = "conv1d",
    norm: str = "norm",
    projection: str = "out_proj",
) -> tuple[Module, ...]:
    """Return the modules of a layer with Gated DeltaNet.

    Args:
        in_projections: their names of the projections that are one of ours.
        grouping: converts the rows of these projections.
        convolutions: their names of the convolutions that are one of ours: one, or three of queries, keys and
            values.
        norm, projection: their names of these.
    """
    apart = len(convolutions.split()) - 1
    rows = Transform(delta_net_rows(3, apart).to_hf, with_parts_joined(delta_net_rows(3)).from_hf)
    return modules(
        "layers.{}.gated_delta_net.",
        "model.layers.{}.linear_attn.",
        ("table", "in_projection", in_projections, grouping),
        ("table", "convolution", convolutions, with_kernel_dim(rows)),
        ("vector", "A_log", "A_log"),
        ("vector", "dt_bias", "dt_bias"),
        ("table", "norm", norm),
        ("table", "projection", projection),
        only_in=lambda spec: isinstance(spec.mixer, DeltaNetSpec),
    )


def _groups_of_two(place: Place) -> tuple[int, Sequence[int]]:
    spec = place.config.delta_net
    return spec.key_heads, (sum(spec.group_rows[:4]), sum(spec.group_rows[4:]))


def delta_net_rows(num_kinds: int, apart: int = 0) -> Transform:
    """Return the transform of the first kinds of rows in a group; see `by_kind`."""
    return by_kind(
        lambda place: (place.config.delta_net.key_heads, place.config.delta_net.group_rows[:num_kinds]), apart
    )


def _split_gated_qkv(qkv: Tensor, place: Place) -> Parts:
    """Split our rows into queries with their gates, head by head, keys and values."""
    spec = place.attention
    grouped = qkv.unflatten(0, (spec.num_kv_heads, -1, spec.head_dim))
    queries, gates, keys, values = grouped.split(spec.group_heads, dim=1)
    return [torch.stack((queries, gates), dim=2).flatten(0, 3), keys.flatten(0, 2), values.flatten(0, 2)]


def _join_gated_qkv(parts: Parts, place: Place) -> Tensor:
    spec = place.attention
    q, k, v = (part.unflatten(0, (spec.num_kv_heads, -1, spec.head_dim)) for part in parts)
    queries, gates = q.unflatten(1, (-1, 2)).unbind(2)
    return torch.cat((queries, gates, k, v), dim=1).flatten(0, 2)


_GATED_QKV = Transform(_split_gated_qkv, _join_gated_qkv)
_ATTENTION = in_layers_that(
    lambda spec: spec.attention is not None,
    *(
        replace(module, transform=_GATED_QKV) if module.kind == "qkv" else module
        for module in QWEN3.layer
        if ".attention." in module.ours
    ),
)
_SHARED_LAYER = (
    *modules_with_some_experts(
        (module for module in QWEN3.layer if ".attention." not in module.ours), _GATED_EXPERTS
    ),
    *_ATTENTION,
)
_SHARE = ("partial_rotary_factor", 0.25)
QWEN3_NEXT = replace(
    QWEN3,
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    rules=(
        *_hybrid(rotary(share=_SHARE)),
        *_in_some_layers(
            *_EXPERT_RULES,
            *_SHARED_EXPERT_RULES,
            switch("norm_topk_prob", "moe_router_pre_softmax", True, negated=True),
        ),
    ),
    layer=(*_SHARED_LAYER, *delta_net_modules("in_proj_qkvz in_proj_ba", by_kind(_groups_of_two, apart=1))),
    experts=FUSED_EXPERTS,
    mtp=(),  # its files have other names for these modules
)


def _read_text_rotary(hf: HFSettings, _: Fields) -> Fields:
    share, theta = hf.get(*_SHARE), hf.get("rope_theta", 10000.0)
    settings = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    # Of images: the three positions of a token of text are equal.
    of_images = {"mrope_section", "mrope_interleaved"}
    of_text = {name: value for name, value in settings.items() if name not in of_images}
    return rotary_fields(of_text, theta, share)


_TEXT_ROTARY = Rule(_read_text_rotary, rotary(share=_SHARE).write)
QWEN3_5 = replace(
    QWEN3_NEXT,
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    rules=_hybrid(_TEXT_ROTARY),
    layer=(
        *_SHARED_LAYER,
        *delta_net_modules("in_proj_qkv in_proj_z in_proj_b in_proj_a", delta_net_rows(6, apart=3)),
    ),
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    rules=(
        only(norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[]),
        *_hybrid(_TEXT_ROTARY, WIDTH),
        *_EXPERT_RULES,
        *_SHARED_EXPERT_RULES,
    ),
    without_effect=("intermediate_size",),
)
