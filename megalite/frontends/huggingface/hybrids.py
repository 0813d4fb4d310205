"""Models with attention and another mixer, in other layers or side by side: LFM2, Falcon-H1, OLMo Hybrid."""

from __future__ import annotations

import math
from dataclasses import replace

from megalite.config import ModelConfig
from megalite.config.model.recurrence import GatedConvolutionSpec
from megalite.frontends.huggingface.dense import FINAL_LAYERNORM, factor_of, rounded
from megalite.frontends.huggingface.family import (
    HALVES,
    OUTPUT,
    QKV,
    SAME,
    VOCABULARY,
    by_kind,
    in_layers_that,
    modules,
    with_kernel_dim,
)
from megalite.frontends.huggingface.llama import OLMO2, WITHOUT_MTP, llama_like
from megalite.frontends.huggingface.mamba import MAMBA_SIZES, attention_modules, mamba_head_dim, mamba_modules
from megalite.frontends.huggingface.positions import read_rotary, recurrent_layers, rotary
from megalite.frontends.huggingface.qwen import DELTA_NET_SIZES, delta_net_modules, delta_net_rows
from megalite.frontends.huggingface.settings import (
    Fields,
    HFSettings,
    Rule,
    biases,
    fixed,
    only,
    setting,
    switch,
)
from megalite.utils.errors import UserError

_OURS, _THEIRS = "layers.{}.", "model.layers.{}."


def _read_lfm2_width(hf: HFSettings, _: Fields) -> Fields:
    width, multiple = hf["block_ff_dim intermediate_size"], hf.get("block_multiple_of", 256)
    factor = hf.get("block_ffn_dim_multiplier", 1.0)
    if hf.switch("block_auto_adjust_ff_dim", True):
        width = int(2 * width / 3)
        if factor is not None:
            width = -(-int(factor * width) // multiple) * multiple
    return {"ffn_hidden_size": width}


def _check_tied(hf: HFSettings, _: Fields) -> Fields:
    hf.require_equal("tie_embedding", "tie_word_embeddings", hf.get("tie_word_embeddings", True))
    return {}


def _lfm2_convolutions(hf: HFSettings, num_layers: int) -> list[bool]:
    with_attention = hf.get("full_attn_idxs")
    return [with_attention is not None and number not in with_attention for number in range(num_layers)]


LFM2 = replace(
    WITHOUT_MTP,
    model_type="lfm2",
    architecture="Lfm2ForCausalLM",
    rules=(
        only(conv_bias=False),
        Rule(_check_tied),
        *llama_like(
            128000,
            1e-5,
            rotary=rotary(1000000.0),
            width="block_ff_dim intermediate_size",
            writes_head_dim=False,
            norm="norm_eps",
            function=fixed(activation="swiglu"),
        ),
        Rule(
            _read_lfm2_width,
            lambda config: {"intermediate_size": config.ffn_size, "block_auto_adjust_ff_dim": False},
        ),
        fixed(qk_layernorm=True, attention_dropout=0.0),
        recurrent_layers(
            "gated_convolution",
            _lfm2_convolutions,
            setting("conv_L_cache", "linear_conv_kernel_dim", 3),
            kind="conv",
        ),
    ),
    ends=(
        *modules(
            "",
            "model.",
            ("table", "embedding.word", "embed_tokens", VOCABULARY),
            ("norm", "final_norm", "embedding_norm"),
        ),
        OUTPUT,
    ),
    layer=(
        *modules(
            _OURS,
            _THEIRS,
            ("norm", "attention_norm", "operator_norm"),
            ("norm", "mlp_norm", "ffn_norm"),
            ("mlp", "mlp.up", "feed_forward.w1 feed_forward.w3", HALVES),
            ("mlp", "mlp.down", "feed_forward.w2"),
        ),
        *modules(
            f"{_OURS}attention.",
            f"{_THEIRS}self_attn.",
            ("qkv", "qkv", "q_proj k_proj v_proj", QKV),
            ("attention_output", "projection", "out_proj"),
            ("norm", "query_norm", "q_layernorm"),
            ("norm", "key_norm", "k_layernorm"),
            only_in=lambda spec: spec.attention is not None,
        ),
        *modules(
            f"{_OURS}gated_convolution.",
            f"{_THEIRS}conv.",
            (
                "table",
                "in_projection",
                "in_proj",
                by_kind(lambda place: (place.config.hidden_size, GatedConvolutionSpec.group_rows)),
            ),
            ("table", "convolution", "conv", with_kernel_dim(SAME)),
            ("table", "projection", "out_proj"),
            only_in=lambda spec: isinstance(spec.mixer, GatedConvolutionSpec),
        ),
    ),
    tied=True,
    # Of training, and other names of settings that are read.
    without_effect=(
        *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu"),
        *("block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads"),
        "use_pos_enc",
    ),
)


def _read_pairs(hf: HFSettings, _: Fields) -> Fields:
    """Return our layers: two for each of theirs, the mixers and the MLP."""
    count = hf["num_hidden_layers"]
    return {"num_layers": 2 * count, "hybrid_override_pattern": "B-" * count}


def _read_mamba_heads(hf: HFSettings, fields: Fields) -> Fields:
    count, width = hf.get("mamba_n_heads", 128), hf.get("mamba_d_ssm", 1024)
    if width is None:
        width = hf.get("mamba_expand", 2) * fields["hidden_size"]
    return {"mamba_num_heads": count, "mamba_head_dim": mamba_head_dim(hf, count, width, "mamba_d_ssm")}


def _write_mamba_heads(config: ModelConfig) -> Fields:
    heads = config.mamba
    return {"mamba_n_heads": heads.num_heads, "mamba_d_head": heads.head_dim, "mamba_d_ssm": heads.width}


def _read_mamba_norm(hf: HFSettings, _: Fields) -> Fields:
    is_first = hf.switch("mamba_norm_before_gate", True)
    has_norm = hf.switch("mamba_rms_norm", False)
    return {"mamba_norm": ("before_gate" if is_first else "after_gate") if has_norm else "none"}


def _write_mamba_norm(config: ModelConfig) -> Fields:
    norm = config.mamba_norm
    return {"mamba_rms_norm": norm != "none", "mamba_norm_before_gate": norm == "before_gate"}


def _read_key_factor(hf: HFSettings, fields: Fields) -> Fields:
    # Without biases, a factor of attention's input is one of queries, keys and values.
    factor = factor_of(hf, "attention_in_multiplier") ** 2 * factor_of(hf, "key_multiplier")
    size = fields["kv_channels"] or fields["hidden_size"] // fields["num_attention_heads"]
    return {"query_pre_attn_scalar": None if factor == 1.0 else rounded(size / factor**2)}


def _write_key_factor(config: ModelConfig) -> Fields:
    size, divisor = config.head_dim, config.squared_score_divisor(config.head_dim)
    factor = up = down = rounded(math.sqrt(size / divisor))
    for _ in range(4):  # to the number that reading makes this divisor of
        factor = next((x for x in (factor, up, down) if rounded(size / x**2) == divisor), factor)
        up, down = math.nextafter(up, math.inf), math.nextafter(down, 0.0)
    return {"key_multiplier": factor, "attention_in_multiplier": 1.0}


def _factors(hf: HFSettings, name: str, count: int) -> list[float]:
    """Return a setting that is a list of factors, all 1 by default."""
    factors = hf.get(name) or [1.0] * count
    if len(factors) != count or not all(isinstance(each, (int, float)) and each > 0 for each in factors):
        raise UserError(f"{hf.kind} with {name} {factors} cannot be converted: {count} numbers above 0 can")
    return [*map(float, factors)]


def _without_ones(*factors: float) -> tuple[float, ...] | None:
    return None if {*factors} == {1.0} else factors


def _read_factors(hf: HFSettings, _: Fields) -> Fields:
    into, of_mamba = (factor_of(hf, f"{name}_in_multiplier") for name in ("attention", "ssm"))
    of_rows, of_mlp = _factors(hf, "ssm_multipliers", 5), _factors(hf, "mlp_multipliers", 2)
    return {
        "mamba_multipliers": _without_ones(*(of_mamba * factor for factor in of_rows)),
        "mixer_multipliers": _without_ones(
            into * factor_of(hf, "attention_out_multiplier"), factor_of(hf, "ssm_out_multiplier")
        ),
        "mlp_multipliers": _without_ones(*of_mlp),
    }


def _write_factors(config: ModelConfig) -> Fields:
    attention, mamba = config.mixer_multipliers or (1.0, 1.0)
    return {
        "ssm_in_multiplier": 1.0,
        "ssm_multipliers": list(config.mamba_multipliers or (1.0,) * 5),
        "attention_out_multiplier": attention,
        "ssm_out_multiplier": mamba,
        "mlp_multipliers": list(config.mlp_multipliers or (1.0, 1.0)),
    }


FALCON_H1 = replace(
    WITHOUT_MTP,
    model_type="falcon_h1",
    architecture="FalconH1ForCausalLM",
    rules=(
        only(attention_bias=False, mlp_bias=False, mamba_proj_bias=False, projectors_bias=False),
        only(mamba_conv_bias=True),
        *llama_like(8192, 1e-5),
        setting("num_key_value_heads", "num_query_groups", 8),
        Rule(_read_pairs, lambda config: {"num_hidden_layers": config.num_layers // 2}),
        Rule(_read_mamba_heads, _write_mamba_heads),
        *MAMBA_SIZES,
        Rule(_read_mamba_norm, _write_mamba_norm),
        Rule(_read_key_factor, _write_key_factor),
        Rule(_read_factors, _write_factors),
        setting("embedding_multiplier", "embedding_multiplier", 1.0),
        setting("lm_head_multiplier", "logit_multiplier", 1.0),
    ),
    ends=FINAL_LAYERNORM,
    layer=tuple(
        replace(module, per_layer=2)
        for module in (
            *modules(
                _OURS,
                _THEIRS,
                ("norm", "attention_norm", "input_layernorm"),
                only_in=lambda spec: spec.mixer is not None,
            ),
            *attention_modules(f"{_THEIRS}self_attn.", f"{_OURS}mixers."),
            *mamba_modules(f"{_THEIRS}mamba.", f"{_OURS}mixers."),
            *modules(
                _OURS,
                _THEIRS,
                ("norm", "mlp_norm", "pre_ff_layernorm"),
                ("mlp", "mlp.up", "feed_forward.gate_proj feed_forward.up_proj", HALVES),
                ("mlp", "mlp.down", "feed_forward.down_proj"),
                only_in=lambda spec: spec.has_mlp,
            ),
        )
    ),
    # Older programs read them.
    without_effect=(
        *("attn_layer_indices", "mamba_chunk_size", "mamba_expand", "mamba_use_mlp", "mlp_expansion_factor"),
        "num_logits_to_keep",
    ),
)


def _read_olmo_positions(hf: HFSettings, _: Fields) -> Fields:
    if (hf.get("rope_parameters") or hf.hf).get("rope_theta", 0.0) is None:
        return {"position_embedding_type": "none"}
    return read_rotary(hf, 10000.0, None)


def _write_olmo_positions(config: ModelConfig) -> Fields:
    if config.position_embedding_type == "none":
        return {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
    return rotary().write(config)


def _read_olmo_sizes(hf: HFSettings, fields: Fields) -> Fields:
    heads = fields["num_attention_heads"]
    found = {
        "linear_num_key_heads": hf.get("linear_num_key_heads") or heads,
        "linear_num_value_heads": hf.get("linear_num_value_heads") or heads,
        "linear_conv_kernel_dim": hf.get("linear_conv_kernel_dim", 4),
    }
    width = int(0.75 * fields["hidden_size"] / found["linear_num_key_heads"])
    found["linear_key_head_dim"] = hf.get("linear_key_head_dim") or width
    found["linear_value_head_dim"] = hf.get("linear_value_head_dim") or 2 * found["linear_key_head_dim"]
    return found


def _all_but_every_fourth(_: HFSettings, num_layers: int) -> list[bool]:
    marks = [number % 4 != 3 for number in range(num_layers)]
    return marks if not all(marks) else [True] * (num_layers - 1) + [False]


_PRE_NORMS = modules(
    _OURS,
    _THEIRS,
    ("norm", "attention_norm", "attention_layer_norm"),
    ("norm", "mlp_norm", "feedforward_layer_norm"),
)
_OUTPUT_NORMS = modules(
    _OURS,
    _THEIRS,
    ("norm", "attention_norm", "feedforward_layer_norm"),
    ("norm", "mlp_norm", "post_feedforward_layernorm"),
)
_CONVOLUTIONS = tuple(f"{kind}_conv1d.weight" for kind in "qkv")
OLMO_HYBRID = replace(
    WITHOUT_MTP,
    model_type="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    rules=(
        only(hidden_act="silu"),
        *llama_like(65536, rotary=Rule(_read_olmo_positions, _write_olmo_positions), writes_head_dim=False),
        biases(),
        fixed(norm_position="output", qk_layernorm=True, qk_layernorm_width="all_heads"),
        recurrent_layers(
            "gated_delta_net",
            _all_but_every_fourth,
            Rule(_read_olmo_sizes, lambda config: {name: getattr(config, name) for name in DELTA_NET_SIZES}),
            switch("linear_allow_neg_eigval", "linear_allow_neg_eigval", True),
            fixed(linear_norm_epsilon=1e-5, linear_pre_norm=True),
        ),
    ),
    layer=(
        *in_layers_that(
            lambda spec: spec.attention is not None,
            *(module for module in OLMO2.layer if ".attention." in module.ours),
            *_OUTPUT_NORMS,
        ),
        *(module for module in OLMO2.layer if ".mlp." in module.ours),
        *in_layers_that(lambda spec: spec.recurrence is not None, *_PRE_NORMS),
        *delta_net_modules(
            "q_proj k_proj v_proj g_proj b_proj a_proj",
            delta_net_rows(6, apart=5),
            "q_conv1d k_conv1d v_conv1d",
            norm="o_norm",
            projection="o_proj",
        ),
    ),
    # transformers writes these names in files, whatever the kind of layer.
    other_names={
        "input_layernorm": "attention_layer_norm",
        "post_attention_layernorm": "feedforward_layer_norm",
    },
    joined={"conv1d.weight": _CONVOLUTIONS},
    # Initial values of decays.
    without_effect=(
        *("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"),
    ),
)
