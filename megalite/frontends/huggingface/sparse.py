"""Mixtures of experts whose tables are those of OLMoE, DeepSeek-V3 or GLM-4.5 with a few other rows.

They are FlexOlmo, dots.llm1, Solar Open, K-EXAONE, Hy3, AFMoE (Trinity), Granite MoE, Hunyuan and ERNIE 4.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megalite.config import ModelConfig
from megalite.frontends.huggingface.deepseek import (
    COUNT,
    EXPERTS,
    after_dense,
    experts_after_dense,
    in_layers_of_experts,
    routed_and_shared,
    shared,
)
from megalite.frontends.huggingface.dense import (
    ERNIE,
    HUNYUAN_QK_NORMS,
    HUNYUAN_RULES,
    MULTIPLIERS,
    QKV_BIAS,
    with_modules,
)
from megalite.frontends.huggingface.experts import (
    FUSED_EXPERTS,
    JOINED_HALVES,
    SHARED_WIDTH,
    WEIGHTS_OF_CHOSEN,
    WIDTH,
    biased_scores,
    expert_bias,
    expert_modules,
    experts,
    has_experts,
    modules_with_some_experts,
    routed_and_shared_modules,
    shared_expert_modules,
)
from megalite.frontends.huggingface.family import Place, Transform, by_kind, modules, qkv_groups
from megalite.frontends.huggingface.gemma import ROOT_OF_WIDTH
from megalite.frontends.huggingface.llama import (
    ATTENTION,
    LLAMA,
    OLMO2,
    OLMO_RULES,
    QK_NORMS,
    WITHOUT_MTP,
    llama_like,
)
from megalite.frontends.huggingface.positions import last_windows, rotary, windows_with_rotation
from megalite.frontends.huggingface.settings import (
    Fields,
    HFSettings,
    Rule,
    biases,
    fixed,
    only,
    switch,
)
from megalite.utils.errors import UserError

_MLP = "model.layers.{}.mlp"
_COUNT = "num_experts num_local_experts"
_LOGITS = "output_router_logits"
"""Their setting of an output, which in families without a balance loss does not change the loss."""
FLEX_OLMO = replace(
    OLMO2,
    model_type="flex_olmo",
    architecture="FlexOlmoForCausalLM",
    rules=(
        only(output_router_logits=False),
        *llama_like(4096, rotary=rotary(500000.0), writes_head_dim=False),
        *OLMO_RULES,
        *experts(_COUNT, "intermediate_size", loss=("router_aux_loss_coef", 0.01)),
        WEIGHTS_OF_CHOSEN,
    ),
    layer=(
        *(module for module in OLMO2.layer if ".mlp." not in module.ours),
        *expert_modules(_MLP),
    ),
    experts=FUSED_EXPERTS,
    mtp=(),
)


def _read_normalized(hf: HFSettings, _: Fields) -> Fields:
    if not hf.switch("norm_topk_prob", False):
        raise UserError(f"{hf.kind} with norm_topk_prob False cannot be converted: only True can")
    return {}


DOTS1 = replace(
    WITHOUT_MTP,
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    rules=(
        *llama_like(),
        biases(),
        fixed(qk_layernorm=True),
        last_windows(62),
        Rule(_read_normalized, lambda _: {"norm_topk_prob": True}),
        *experts_after_dense(0, 1.0, biased_scores()),
    ),
    layer=(*modules_with_some_experts(LLAMA.layer, EXPERTS), *QK_NORMS),
    without_effect=(_LOGITS,),
    experts=FUSED_EXPERTS,
)
SOLAR_OPEN = replace(
    WITHOUT_MTP,
    model_type="solar_open",
    architecture="SolarOpenForCausalLM",
    rules=(
        only(first_k_dense_replace=0, use_qk_norm=False, partial_rotary_factor=1.0),
        *llama_like(131072, 1e-5, rotary=rotary(1000000.0), width=WIDTH, head_dim=128),
        switch(*QKV_BIAS, False, "has_qkv_bias"),
        *routed_and_shared(COUNT, 1.0, biased_scores()),
    ),
    layer=(*ATTENTION, *EXPERTS),
    without_effect=(_LOGITS, "intermediate_size"),
    experts=FUSED_EXPERTS,
)


def layer_kinds(old_name: str = "") -> Rule:
    """Return the rule of a list of layers with and without experts; the first is dense if there is no list.

    Args:
        old_name: name of the number of the first dense layers, if there may be one in the place of a list.
    """
    dense, sparse, name = "dense", "sparse", "mlp_layer_types"

    def read(hf: HFSettings, fields: Fields) -> Fields:
        num_dense, num_layers = hf.get(old_name, 1) if old_name else 1, fields["num_layers"]
        usual = [dense if number < num_dense else sparse for number in range(num_layers)]
        kinds = usual if hf.get(name) is None else hf[name]
        if len(kinds) != num_layers or not {*kinds} <= {dense, sparse}:
            raise UserError(f"{name} {kinds} cannot be converted: {dense} and {sparse} of each layer can")
        if sparse not in kinds:
            return {}
        marks = tuple(int(kind == sparse) for kind in kinds)
        return {"moe_layer_freq": None if all(marks) else marks}

    return Rule(
        read, lambda config: {name: [sparse if has_experts(spec) else dense for spec in config.layer_specs]}
    )


_IN_ONE_GROUP = only(n_group=1, topk_group=1)
_BIASED = replace(biased_scores(), write=Rule().write)  # in one group
EXAONE_MOE = replace(
    WITHOUT_MTP,
    model_type="exaone_moe",
    architecture="ExaoneMoeForCausalLM",
    rules=(
        *llama_like(2048, 1e-5),
        fixed(qk_layernorm=True),
        windows_with_rotation(4, "sliding_window_pattern"),
        layer_kinds("first_k_dense_replace"),
        in_layers_of_experts(
            *routed_and_shared(_COUNT, 2.5, biased_scores(), num_shared="num_shared_experts")
        ),
    ),
    layer=(
        *modules_with_some_experts(
            LLAMA.layer,
            routed_and_shared_modules("shared_experts", "e_score_correction_bias"),
        ),
        *QK_NORMS,
    ),
    without_effect=(_LOGITS,),
    experts=FUSED_EXPERTS,
    other_names={".mlp.gate.e_score_correction_bias": ".mlp.e_score_correction_bias"},
)
HY_V3 = replace(
    WITHOUT_MTP,
    model_type="hy_v3",
    architecture="HYV3ForCausalLM",
    rules=(
        only(mlp_bias=False),
        _IN_ONE_GROUP,
        *llama_like(131072, 1e-5, rotary=rotary(11158840.0), head_dim=128),
        biases(),
        fixed(qk_layernorm=True),
        layer_kinds(),
        in_layers_of_experts(
            *routed_and_shared(
                _COUNT,
                2.826,
                _BIASED,
                num_shared="num_shared_experts",
                scale="router_scaling_factor",
            )
        ),
    ),
    layer=(
        *modules_with_some_experts(
            LLAMA.layer,
            routed_and_shared_modules("shared_mlp", "expert_bias", "router.gate"),
        ),
        *QK_NORMS,
    ),
    without_effect=(_LOGITS, "enable_moe_fp32_combine"),  # the latter changes the rounding of a sum
    experts=FUSED_EXPERTS,
    other_names={
        ".mlp.gate.weight": ".mlp.router.gate.weight",
        ".mlp.e_score_correction_bias": ".mlp.expert_bias",
        ".mlp.shared_experts.": ".mlp.shared_mlp.",
    },
)


def _gated_groups(place: Place) -> tuple[int, Sequence[int]]:
    groups, (queries, *others) = qkv_groups(place)
    return groups, (queries, queries, *others)


_SCALE = "mup_enabled"
_GATED_QKV = "self_attn.q_proj self_attn.gate_proj self_attn.k_proj self_attn.v_proj"
AFMOE = replace(
    WITHOUT_MTP,
    model_type="afmoe",
    architecture="AfmoeForCausalLM",
    rules=(
        only(attention_bias=False, score_func="sigmoid", route_norm=True),
        only(num_expert_groups=1, num_limited_groups=1),
        _IN_ONE_GROUP,
        *llama_like(16384, 1e-5, head_dim=128),
        fixed(norm_position="sandwich", qk_layernorm=True, attention_output_gate=True),
        Rule(
            lambda hf, fields: ROOT_OF_WIDTH.read(hf, fields) if hf.switch(_SCALE, False) else {},
            lambda config: {_SCALE: config.embedding_multiplier != 1.0},
        ),
        windows_with_rotation(4, "global_attn_every_n_layers", usual_size=1024),
        after_dense("num_dense_layers", 1),
        in_layers_of_experts(
            *routed_and_shared(
                _COUNT,
                1.0,
                _BIASED,
                num_shared="num_shared_experts",
                scale="route_scale",
            )
        ),
    ),
    layer=(
        *modules_with_some_experts(
            with_modules(
                LLAMA.layer,
                ("qkv", "attention.qkv", _GATED_QKV, by_kind(_gated_groups, apart=3)),
                ("norm", "attention_output_norm", "post_attention_layernorm"),
                ("norm", "mlp_norm", "pre_mlp_layernorm"),
                ("norm", "mlp_output_norm", "post_mlp_layernorm"),
            ),
            routed_and_shared_modules("shared_experts", "expert_bias", "router.gate"),
        ),
        *QK_NORMS,
    ),
    without_effect=(_LOGITS, "load_balance_coeff", "use_grouped_mm"),  # of training and of kernels
    experts=FUSED_EXPERTS,
)
_BLOCK = "block_sparse_moe."
GRANITE_EXPERTS = modules(
    "layers.{}.mlp.",
    f"model.layers.{{}}.{_BLOCK}",
    ("table", "router", "router.layer"),
    ("table", "up", "input_linear", JOINED_HALVES),
    ("table", "down", "output_linear"),
)
"""Granite's routed experts."""
GRANITEMOE = replace(
    WITHOUT_MTP,
    model_type="granitemoe",
    architecture="GraniteMoeForCausalLM",
    rules=(
        only(output_router_logits=False),
        *llama_like(),
        biases(),
        *experts("num_local_experts num_experts", "intermediate_size"),
        *MULTIPLIERS,
    ),
    layer=(*ATTENTION, *GRANITE_EXPERTS),
    other_names={
        f"{_BLOCK}experts.gate_up_proj": f"{_BLOCK}input_linear.weight",
        f"{_BLOCK}experts.down_proj": f"{_BLOCK}output_linear.weight",
        f"{_BLOCK}router.weight": f"{_BLOCK}router.layer.weight",
    },
)

_TOPK = "moe_topk num_experts_per_tok"


def _read_topk(hf: HFSettings, _: Fields) -> Fields:
    topk, count = hf[_TOPK], hf[_COUNT]
    of_layers = {*topk} if isinstance(topk, list) else {topk}
    if len(of_layers) != 1 or count == 1:
        raise UserError(
            f"{hf.kind} with moe_topk {topk} and num_experts {count} cannot be converted: only several "
            "experts, and as many of them for a token in each layer, can"
        )
    return {"moe_router_topk": of_layers.pop()}


HUNYUAN_V1_MOE = replace(
    WITHOUT_MTP,
    model_type="hunyuan_v1_moe",
    architecture="HunYuanMoEV1ForCausalLM",
    rules=(
        *HUNYUAN_RULES,
        *experts(_COUNT, "intermediate_size", _TOPK, loss=None),
        Rule(_read_topk),
        Rule(lambda _, fields: {SHARED_WIDTH: fields["ffn_hidden_size"]}),
    ),
    layer=(
        *ATTENTION,
        *HUNYUAN_QK_NORMS,
        *expert_modules(_MLP, router="gate.wg"),
        *shared_expert_modules(f"{_MLP}.shared_mlp"),
    ),
    without_effect=(_LOGITS, "eod_token_id"),
    experts=FUSED_EXPERTS,
)


def _read_ernie_layers(hf: HFSettings, fields: Fields) -> Fields:
    num_layers, first = fields["num_layers"], hf.get("moe_layer_start_index", 1)
    last, step = hf.get("moe_layer_end_index", -1), hf.get("moe_layer_interval", 1)
    last = num_layers - 1 if last == -1 else last
    marks = tuple(int((layer + 1) % step == 0 and first <= layer <= last) for layer in range(num_layers))
    return {} if not any(marks) else {"moe_layer_freq": None if all(marks) else marks}


def _write_ernie_layers(config: ModelConfig) -> Fields:
    layers = [number for number, spec in enumerate(config.layer_specs) if has_experts(spec)]
    first, last = (layers[0], layers[-1]) if layers else (config.num_layers, config.num_layers - 1)
    step = layers[1] - layers[0] if len(layers) > 1 else 1
    return {"moe_layer_start_index": first, "moe_layer_end_index": last, "moe_layer_interval": step}


_BIAS = "moe_statics.e_score_correction_bias"
_ONE_ROW = Transform(lambda full, _: [full.unsqueeze(0)], lambda parts, _: parts[0].squeeze(0))
ERNIE4_5_MOE = replace(
    WITHOUT_MTP,
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    rules=(
        only(use_bias=False, output_router_logits=False, moe_norm_min=1e-12),
        *llama_like(131072, 1e-5, rotary=rotary(500000.0)),
        *ERNIE,
        Rule(_read_ernie_layers, _write_ernie_layers),
        in_layers_of_experts(
            *experts("moe_num_experts num_experts num_local_experts", topk="moe_k num_experts_per_tok"),
            fixed(moe_router_enable_expert_bias=True),
            shared("moe_num_shared_experts"),
        ),
    ),
    layer=modules_with_some_experts(
        LLAMA.layer,
        (
            *expert_modules(_MLP),
            *shared_expert_modules(f"{_MLP}.shared_experts"),
            *(replace(each, transform=_ONE_ROW) for each in expert_bias(f"{_MLP}.{_BIAS}")),
        ),
    ),
    tied=True,
    experts=FUSED_EXPERTS,
    other_names={f".mlp.gate.{_BIAS}": f".mlp.{_BIAS}"},
)
