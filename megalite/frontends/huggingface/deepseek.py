"""DeepSeek-V2 and V3, which have multi-latent attention, and GLM-4.5, which has their experts."""

from __future__ import annotations

from dataclasses import replace

from megalite.config import ModelConfig
from megalite.frontends.huggingface.experts import (
    FUSED_EXPERTS,
    SHARED_WIDTH,
    WIDTH,
    biased_scores,
    experts,
    has_experts,
    modules_with_some_experts,
    routed_and_shared_modules,
    written_groups,
)
from megalite.frontends.huggingface.family import modules
from megalite.frontends.huggingface.llama import LLAMA, QK_NORMS, llama_like
from megalite.frontends.huggingface.positions import rotary
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

EXPERTS = routed_and_shared_modules("shared_experts", "gate.e_score_correction_bias")
"""Modules of a layer with experts."""


def after_dense(name: str, dense: int) -> Rule:
    """Return the rule of the number of the first layers, which have no experts; `dense` is its default."""

    def read(hf: HFSettings, fields: Fields) -> Fields:
        first_dense = int(hf.get(name, dense))
        if first_dense >= fields["num_layers"]:
            return {}
        marks = (0,) * first_dense + (1,) * (fields["num_layers"] - first_dense)
        return {"moe_layer_freq": marks if first_dense else None}

    def write(config: ModelConfig) -> Fields:
        of_experts = (number for number, spec in enumerate(config.layer_specs) if has_experts(spec))
        return {name: next(of_experts, config.num_layers)}

    return Rule(read, write)


def in_layers_of_experts(*rules: Rule) -> Rule:
    """Return rules that have no effect in a model without experts; a rule before sets `moe_layer_freq`."""
    return where(lambda hf, fields: "moe_layer_freq" in fields, lambda config: config.has_experts, *rules)


def shared(count: str) -> Rule:
    """Return the rule of shared experts, which are one here; `count` is their name of the number."""

    def write(config: ModelConfig) -> Fields:
        return {count: (config.moe_shared_expert_intermediate_size or 0) // config.expert_ffn_size}

    return Rule(lambda hf, _: {SHARED_WIDTH: hf[WIDTH] * hf[count]}, write, (count,))


def routed_and_shared(
    count: str,
    factor: float,
    *scores: Rule,
    num_shared: str = "n_shared_experts",
    scale: str = "routed_scaling_factor",
) -> tuple[Rule, ...]:
    """Return the rules of DeepSeek's experts, of which each token has some and all have shared ones.

    Args:
        count, num_shared: their names of the numbers of experts.
        factor: default of `scale`, their name of the factor of weights.
        scores: rules of the scores that choose experts.
    """
    return (
        *experts(count, loss=("aux_loss_alpha", 0.0)),
        shared(num_shared),
        setting(scale, "moe_router_topk_scaling_factor", factor),
        *scores,
    )


COUNT = "n_routed_experts num_local_experts num_experts"
"""DeepSeek's names of the number of experts."""


def experts_after_dense(dense: int, factor: float, *scores: Rule) -> tuple[Rule, Rule]:
    """Return the rules of DeepSeek's experts, which the layers after the first dense ones have.

    Args:
        dense: default of `first_k_dense_replace`.
        factor, scores: see `routed_and_shared`.
    """
    return (
        after_dense("first_k_dense_replace", dense),
        in_layers_of_experts(only(moe_layer_freq=1), *routed_and_shared(COUNT, factor, *scores)),
    )


def _read_heads(hf: HFSettings, _: Fields) -> Fields:
    if hf.get("num_key_value_heads") is not None:
        hf.require(num_key_value_heads=hf["num_attention_heads"])
    return {"num_query_groups": None, "kv_channels": None}


LATENT_SIZES = (
    biases(),
    Rule(_read_heads, lambda config: {"num_key_value_heads": config.num_attention_heads}),
    fixed(
        latent_norm_epsilon=1e-6,  # of the norms of latents, which their config does not have
        multi_latent_attention=True,
        qk_layernorm=True,
    ),
    setting("q_lora_rank", "q_lora_rank", None),
    setting("kv_lora_rank", "kv_lora_rank", None),
    setting("qk_nope_head_dim", "qk_head_dim", None),
    setting("qk_rope_head_dim", "qk_pos_emb_head_dim", None),
    setting("v_head_dim", "v_head_dim", None),
)
"""Rules of multi-latent attention."""
_LATENT_RULES = (only(mlp_bias=False), *llama_like(writes_head_dim=False), *LATENT_SIZES)
"""Rules of dense models that DeepSeek-V2 and V3 share."""


_OURS, _THEIRS = "layers.{}.attention.", "model.layers.{}.self_attn."
LATENT_ATTENTION = (
    *modules(
        _OURS,
        _THEIRS,
        ("qkv", "query_down", "q_a_proj"),
        ("norm", "query_norm", "q_a_layernorm"),
        ("linear", "query_up", "q_b_proj"),
        only_if=lambda config: config.q_lora_rank is not None,
    ),
    *modules(
        _OURS,
        _THEIRS,
        ("linear", "query_up", "q_proj"),
        only_if=lambda config: config.q_lora_rank is None,
    ),
    *modules(
        _OURS,
        _THEIRS,
        ("qkv", "key_value_down", "kv_a_proj_with_mqa"),
        ("norm", "key_value_norm", "kv_a_layernorm"),
        ("linear", "key_value_up", "kv_b_proj"),
    ),
)
"""Modules of a layer besides the projection of its output."""


DEEPSEEK_V3 = replace(
    LLAMA,
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    rules=(
        *_LATENT_RULES,
        switch("rope_interleave", "rotary_interleaved", True),
        *experts_after_dense(3, 2.5, only(topk_method="noaux_tc"), biased_scores(groups=8, group_topk=4)),
    ),
    layer=(
        *modules_with_some_experts((module for module in LLAMA.layer if module.kind != "qkv"), EXPERTS),
        *LATENT_ATTENTION,
    ),
    without_effect=(
        *("ep_size", "seq_aux", "output_router_logits", "router_aux_loss_coef"),  # of training
        "qk_head_dim",  # a sum of sizes
    ),
    experts=FUSED_EXPERTS,
)
_GREEDY, _IN_GROUPS = "greedy", "group_limited_greedy"


def _read_groups(hf: HFSettings, _: Fields) -> Fields:
    """Return our fields for `topk_method`: a token's experts are of all groups, or of those with the best."""
    method, numbers = hf.get("topk_method", _GREEDY), (hf.get("n_group"), hf.get("topk_group"))
    if method == _GREEDY or numbers == (1, 1):
        return {}
    hf.require(topk_method=_IN_GROUPS)
    names = "moe_router_num_groups", "moe_router_group_topk", "moe_router_group_scores"
    return dict(zip(names, (*numbers, 1), strict=True))


def _write_groups(config: ModelConfig) -> Fields:
    method = _GREEDY if config.moe_router_num_groups is None else _IN_GROUPS
    return {"topk_method": method, "norm_topk_prob": False, **written_groups(config)}


DEEPSEEK_V2 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    rules=(
        *_LATENT_RULES,
        fixed(rotary_interleaved=True),
        *experts_after_dense(
            0,
            1.0,
            only(norm_topk_prob=False, scoring_func="softmax"),
            fixed(moe_router_pre_softmax=True),
            Rule(_read_groups, _write_groups, ("topk_method", "n_group", "topk_group")),
        ),
    ),
)
GLM4_MOE = replace(
    LLAMA,
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    rules=(
        only(output_router_logits=False),
        *llama_like(131072, 1e-5, rotary=rotary(share=("partial_rotary_factor", 0.5))),
        switch("attention_bias", "add_qkv_bias", False, "has_qkv_bias"),
        switch("use_qk_norm", "qk_layernorm", False),
        *experts_after_dense(1, 1.0, biased_scores()),
    ),
    layer=(
        *modules_with_some_experts(LLAMA.layer, EXPERTS),
        *(replace(each, only_if=lambda config: config.qk_layernorm) for each in QK_NORMS),
    ),
    experts=FUSED_EXPERTS,
)
