"""Models with Mamba-2: Nemotron-H, Bamba, and Granite 4 with and without experts.

A layer of Nemotron-H has one block, which is Mamba-2, attention, an MLP or experts. A layer of the others has
two, and is two layers here.

Shapes: g groups, r heads of a group, p head size, d state size. The rows of Mamba-2's input projection are
grouped here, ``[g, 2 r p + 2 d + r, ...]``; theirs are the gates of all groups, then x, B, C and time steps.
"""

from __future__ import annotations

import math
from dataclasses import replace

from megalite.config import LayerSpec, ModelConfig
from megalite.config.model.recurrence import MambaSpec
from megalite.frontends.huggingface.dense import FINAL_LAYERNORM, JOINED_ROWS, MULTIPLIERS
from megalite.frontends.huggingface.experts import (
    SEPARATE,
    SHARED_WIDTH,
    biased_scores,
    experts,
    has_experts,
)
from megalite.frontends.huggingface.family import (
    HALVES,
    OUTPUT,
    QKV,
    VOCABULARY,
    Family,
    Module,
    Transform,
    by_kind,
    in_layers_that,
    modules,
    with_kernel_dim,
)
from megalite.frontends.huggingface.llama import WITHOUT_MTP, llama_like
from megalite.frontends.huggingface.positions import read_rotary, rotary
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
    switch,
    where,
)
from megalite.frontends.huggingface.sparse import GRANITE_EXPERTS, GRANITEMOE
from megalite.utils.errors import UserError

_LETTERS = {
    **{"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"},
    **{"mamba": "M", "attention": "*"},
}
"""Our letter for each of their names of a layer's block; the last two are of older files."""
_BLOCKS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Their name for each of our letters that they have."""


def _read_pattern(hf: HFSettings, _: Fields) -> Fields:
    """Return our letters of the layers, which newer files have as a list of names."""
    blocks = hf["layers_block_type layer_types hybrid_override_pattern"]
    letters = [_LETTERS.get(block, str(block)) for block in blocks]  # of older files, a string of our letters
    if unknown := sorted({*letters} - _BLOCKS.keys()):
        raise UserError(f"nemotron_h with layers {', '.join(unknown)} cannot be converted: M, *, - and E can")
    if "E" in letters and hf.get("mlp_bias", False):  # their routed experts would have no biases
        bias = hf["mlp_bias"]
        raise UserError(f"nemotron_h with experts with mlp_bias {bias} cannot be converted: only False can")
    return {"num_layers": len(letters), "hybrid_override_pattern": "".join(letters)}


def _write_pattern(config: ModelConfig) -> Fields:
    """Return their settings for the letters of the layers; a model without letters has other layers."""
    pattern = config.hybrid_override_pattern or "-" * config.num_layers
    return {
        "layers_block_type": [_BLOCKS.get(letter, "mlp") for letter in pattern],
        "num_hidden_layers": len(pattern),
    }


def _by_kind(kinds: slice) -> Transform:
    """Return the transform of rows of some kinds, of those of `MambaSpec.group_rows`."""
    return by_kind(lambda place: (place.config.mamba.num_groups, place.config.mamba.group_rows[kinds]))


_WITHOUT_EFFECT = (
    *("chunk_size", "expand", "mamba_proj_bias", "mamba_ssm_cache_dtype", "num_hidden_layers", "norm_eps"),
    *("num_logits_to_keep", "output_router_logits", "rescale_prenorm_residual", "residual_in_fp32"),
    *("rms_norm_eps", "tie_word_embeddings", "time_step_floor", "time_step_limit", "time_step_max"),
    *("time_step_rank", "use_mamba_kernels", "mtp_layers_block_type", "moe_shared_expert_overlap"),
    *("partial_rotary_factor", "rope_theta"),  # attention is not rotated
)
_PROJECTED, _MIXED = _by_kind(slice(None)), _by_kind(slice(1, 4))
_OURS, _LAYER = "layers.{}.", "backbone.layers.{}."
_MIXER = _LAYER + "mixer."


def _has_mamba(spec: LayerSpec) -> bool:
    return isinstance(spec.recurrence, MambaSpec)


def mamba_modules(theirs: str, ours: str = "layers.{}.") -> tuple[Module, ...]:
    """Return the modules of Mamba-2; `ours` and `theirs` are prefixes of the names."""
    return modules(
        ours + "mamba.",
        theirs,
        ("mamba", "in_projection", "in_proj", _PROJECTED),
        ("vector", "convolution.weight", "conv1d.weight", with_kernel_dim(_MIXED)),
        ("vector", "convolution.bias", "conv1d.bias", _MIXED),
        *(("vector", name, name) for name in ("A_log", "D", "dt_bias")),
        ("mamba", "projection", "out_proj"),
        only_in=_has_mamba,
    ) + modules(
        ours + "mamba.",
        theirs,
        ("vector", "norm", "norm.weight"),
        only_in=_has_mamba,
        only_if=lambda config: config.mamba_norm != "none",
    )


def attention_modules(theirs: str, ours: str = "layers.{}.") -> tuple[Module, ...]:
    """Return the modules of attention; `ours` and `theirs` are prefixes of the names."""
    return modules(
        ours + "attention.",
        theirs,
        ("qkv", "qkv", "q_proj k_proj v_proj", QKV),
        ("attention_output", "projection", "o_proj"),
        only_in=lambda spec: spec.attention is not None,
    )


def _has_experts(_: HFSettings, fields: Fields) -> bool:
    return "E" in fields["hybrid_override_pattern"]


NEMOTRON_H = Family(
    "nemotron_h",
    "NemotronHForCausalLM",
    (
        only(attention_bias=False, sliding_window=None, num_nextn_predict_layers=0),
        Rule(_read_pattern, _write_pattern),
        setting("hidden_size", "hidden_size"),
        setting("intermediate_size", "ffn_hidden_size"),
        setting("num_attention_heads", "num_attention_heads"),
        setting("num_key_value_heads", "num_query_groups", None),
        setting("head_dim", "kv_channels", 128),
        only(use_conv_bias=True, mamba_hidden_act="silu"),
        setting("mamba_num_heads", "mamba_num_heads", attribute="mamba.num_heads"),
        setting("mamba_head_dim", "mamba_head_dim", attribute="mamba.head_dim"),
        setting("n_groups", "mamba_num_groups", attribute="mamba.num_groups"),
        setting("ssm_state_size", "mamba_state_dim", attribute="mamba.state_dim"),
        setting("conv_kernel", "mamba_conv_kernel", 4, "mamba.kernel"),
        setting("time_step_min", "mamba_min_time_step", 0.001, "mamba.min_time_step"),
        switch("use_bias", "mamba_bias", False, "has_mamba_bias"),
        where(
            _has_experts,
            lambda config: config.has_experts,
            replace(
                only(n_shared_experts=1, norm_topk_prob=True),
                write=lambda config: {"n_shared_experts": 1, "norm_topk_prob": True},
            ),
            only(output_router_logits=False),
            *experts("n_routed_experts num_local_experts", loss=None),
            setting("moe_latent_size", "moe_latent_size", None),
            setting(SHARED_WIDTH, SHARED_WIDTH),
            setting("routed_scaling_factor", "moe_router_topk_scaling_factor", 1.0),
            biased_scores(),
        ),
        setting("max_position_embeddings", "seq_length", 4096),
        fixed(position_embedding_type="none", normalization="RMSNorm", add_bias_linear=False),
        setting("layer_norm_epsilon", "norm_epsilon", 1e-5),
        activation("mlp_hidden_act", "relu2"),
        switch("mlp_bias", "add_mlp_bias", False, "has_mlp_bias"),
        setting("hidden_dropout", "hidden_dropout", 0.0),
        setting("attention_dropout", "attention_dropout", 0.0),
    ),
    (
        *modules(
            "",
            "backbone.",
            ("table", "embedding.word", "embeddings", VOCABULARY),
            ("norm", "final_norm", "norm_f"),
        ),
        OUTPUT,
    ),
    (
        *modules(
            _OURS, _LAYER, ("norm", "attention_norm", "norm"), only_in=lambda spec: spec.mixer is not None
        ),
        *modules(_OURS, _LAYER, ("norm", "mlp_norm", "norm"), only_in=lambda spec: spec.has_mlp),
        *mamba_modules(_MIXER),
        *attention_modules(_MIXER),
        *modules(
            _OURS + "mlp.",
            _MIXER,
            ("mlp", "up", "up_proj"),
            ("mlp", "down", "down_proj"),
            only_in=lambda spec: spec.ffn_size is not None,
        ),
        *modules(
            _OURS + "mlp.",
            _MIXER,
            ("table", "router", "gate"),
            ("vector", "router.expert_bias", "gate.e_score_correction_bias"),
            ("table", "up", "experts.{expert}.up_proj", SEPARATE),
            ("table", "down", "experts.{expert}.down_proj", SEPARATE),
            ("linear", "shared.up", "shared_experts.up_proj"),
            ("linear", "shared.down", "shared_experts.down_proj"),
            only_in=has_experts,
        ),
        *modules(
            _OURS + "mlp.",
            _MIXER,
            ("table", "to_latent", "fc1_latent_proj"),
            ("table", "from_latent", "fc2_latent_proj"),
            only_in=has_experts,
            only_if=lambda config: config.moe_latent_size is not None,
        ),
    ),
    prefix="backbone.",
    tied=None,
    without_effect=_WITHOUT_EFFECT,
    experts={"experts.up_proj": ("up_proj",), "experts.down_proj": ("down_proj",)},
    other_names={"model.": "backbone."},  # transformers 5 has another name than its files
)


def _read_pairs(hf: HFSettings, _: Fields) -> Fields:
    """Return our letters: two for each layer, of Mamba-2 or attention, and of the MLP or experts."""
    kinds = hf["layer_types layers_block_type"]
    mixers = [_LETTERS.get(kind, str(kind)) for kind in kinds]
    if unknown := sorted({*mixers} - {"M", "*"}):
        raise UserError(f"{hf.kind} with layers {', '.join(unknown)} cannot be converted: M and * can")
    if len(kinds) != hf["num_hidden_layers"]:
        raise UserError(f"{hf.kind} has {len(kinds)} layer_types for {hf['num_hidden_layers']} layers")
    second = "E" if hf.get("num_local_experts", 8) else "-"
    return {
        "num_layers": 2 * len(mixers),
        "hybrid_override_pattern": "".join(mixer + second for mixer in mixers),
    }


def _write_pairs(config: ModelConfig) -> Fields:
    kinds = [_BLOCKS.get(letter, "mlp") for letter in _mixers(config)]
    return {"layer_types": kinds, "num_hidden_layers": len(kinds)}


def _mixers(config: ModelConfig) -> str:
    """Return the letters of every second layer, which are those of the mixers in a model of pairs."""
    return (config.hybrid_override_pattern or "*-" * config.num_layers)[::2]


def mamba_head_dim(hf: HFSettings, count: int, width: int, source: str) -> int:
    """Return the size of a head of Mamba-2, of which `count` have a width that the setting `source` gives."""
    size: int = width // count if hf.get("mamba_d_head", "auto") == "auto" else hf["mamba_d_head"]
    if size * count != width:
        raise UserError(f"{hf.kind} with {count} heads of {size} cannot be converted: {source} needs {width}")
    return size


def _read_head_dim(hf: HFSettings, fields: Fields) -> Fields:
    count, width = fields["mamba_num_heads"], hf.get("mamba_expand", 2) * fields["hidden_size"]
    return {"mamba_head_dim": mamba_head_dim(hf, count, width, "mamba_expand")}


def _write_head_dim(config: ModelConfig) -> Fields:
    size = config.mamba.head_dim
    return {"mamba_d_head": size, "mamba_expand": size * config.mamba.num_heads // config.hidden_size}


def _read_time_steps(hf: HFSettings, _: Fields) -> Fields:
    least, most = hf.get("time_step_limit") or (0.0, math.inf)
    if most not in (math.inf, "Infinity", {"__float__": "Infinity"}):
        raise UserError(f"{hf.kind} with a time_step_limit of {most} cannot be converted: only Infinity can")
    return {"mamba_min_time_step": least}


def _write_time_steps(config: ModelConfig) -> Fields:
    least = config.mamba.min_time_step
    return {"time_step_limit": [least, math.inf]} if least else {}


def _read_positions(hf: HFSettings, _: Fields) -> Fields:
    if (kind := hf.get("position_embedding_type")) not in (None, "nope", "rope"):
        raise UserError(f"{hf.kind} with position_embedding_type {kind} cannot be converted: rope can")
    rotated = read_rotary(hf, 10000.0, None)  # read in any case: files have a base
    return rotated if kind == "rope" else {"position_embedding_type": "none"}


def _write_positions(config: ModelConfig) -> Fields:
    if config.position_embedding_type == "none":
        return {"position_embedding_type": None}
    return rotary().write(config) | {"position_embedding_type": "rope"}


MAMBA_SIZES = (
    setting("mamba_n_groups", "mamba_num_groups", 1, "mamba.num_groups"),
    setting("mamba_d_state", "mamba_state_dim", 256, "mamba.state_dim"),
    Rule(_read_time_steps, _write_time_steps),
    setting("mamba_d_conv", "mamba_conv_kernel", 4, "mamba.kernel"),
)
_MAMBA_OF_PAIRS = (
    setting("mamba_n_heads", "mamba_num_heads", 128, "mamba.num_heads"),
    Rule(_read_head_dim, _write_head_dim),
    *MAMBA_SIZES,
    switch("mamba_proj_bias", "mamba_bias", False, "has_mamba_bias"),
)
"""Rules of Mamba-2 in Granite and Bamba."""
_GRANITE = "model.layers.{}."


def _mixers_of_pairs(mlp_norm: str) -> tuple[Module, ...]:
    """Return the norms and mixers of Granite and Bamba; `mlp_norm` is their name of the second norm."""
    first = modules(_OURS, _GRANITE, ("norm", "attention_norm", "input_layernorm"))
    second = modules(_OURS, _GRANITE, ("norm", "mlp_norm", mlp_norm))
    return (
        *in_layers_that(lambda spec: spec.mixer is not None, *first),
        *in_layers_that(lambda spec: spec.has_mlp, *second),
        *mamba_modules(f"{_GRANITE}mamba."),
        *attention_modules(f"{_GRANITE}self_attn."),
    )


GRANITEMOEHYBRID = replace(
    WITHOUT_MTP,
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    rules=(
        only(output_router_logits=False, mamba_conv_bias=True),
        Rule(_read_pairs, _write_pairs),
        setting("hidden_size", "hidden_size"),
        setting("num_attention_heads", "num_attention_heads"),
        setting("num_key_value_heads", "num_query_groups", None),
        where(
            lambda hf, fields: not _has_experts(hf, fields),
            lambda config: not config.has_experts,
            setting("shared_intermediate_size", "ffn_hidden_size", 1024),
            Rule(write=lambda _: {"num_local_experts": 0}),
        ),
        where(
            _has_experts,
            lambda config: config.has_experts,
            *experts("num_local_experts", "intermediate_size"),
            setting("shared_intermediate_size", SHARED_WIDTH, 1024),
        ),
        *_MAMBA_OF_PAIRS,
        setting("max_position_embeddings", "seq_length", 2048),
        Rule(_read_positions, _write_positions),
        setting("rms_norm_eps", "norm_epsilon", 1e-6),
        activation("hidden_act", "silu", HF_GATES),
        setting("attention_dropout", "attention_dropout", 0.0),
        fixed(normalization="RMSNorm", add_bias_linear=False, hidden_dropout=0.0),
        biases(),
        *MULTIPLIERS,
    ),
    layer=tuple(
        replace(module, per_layer=2)
        for module in (
            *_mixers_of_pairs("post_attention_layernorm"),
            *modules(
                f"{_OURS}mlp.",
                f"{_GRANITE}shared_mlp.",
                ("mlp", "up", "input_linear", JOINED_ROWS),
                ("mlp", "down", "output_linear"),
                only_in=lambda spec: spec.ffn_size is not None,
            ),
            *modules(
                f"{_OURS}mlp.shared.",
                f"{_GRANITE}shared_mlp.",
                ("linear", "up", "input_linear", JOINED_ROWS),
                ("linear", "down", "output_linear"),
                only_in=has_experts,
            ),
            *in_layers_that(has_experts, *GRANITE_EXPERTS),
        )
    ),
    other_names=GRANITEMOE.other_names,
    without_effect=("mamba_chunk_size", "init_method", "normalization_function"),
)


def _read_indices(hf: HFSettings, _: Fields) -> Fields:
    layers, found = range(hf["num_hidden_layers"]), hf.get("attn_layer_indices") or ()
    if outside := sorted({*found} - {*layers}):
        raise UserError(f"{hf.kind} with {len(layers)} layers has attn_layer_indices {outside}")
    letters = "".join("*-" if number in found else "M-" for number in layers)
    return {"num_layers": len(letters), "hybrid_override_pattern": letters}


def _write_indices(config: ModelConfig) -> Fields:
    mixers = _mixers(config)
    found = [number for number, letter in enumerate(mixers) if letter == "*"]
    return {"attn_layer_indices": found, "num_hidden_layers": len(mixers)}


_HALF_ROTATED = Rule(lambda hf, _: read_rotary(hf, 10000.0, 0.5), rotary().write)
"""Rule of positions of half of a head's elements, unless `rope_parameters` has another share."""
BAMBA = replace(
    GRANITEMOEHYBRID,
    model_type="bamba",
    architecture="BambaForCausalLM",
    rules=(
        only(mamba_conv_bias=True, z_loss_coefficient=0.0, partial_rotary_factor=0.5),
        *llama_like(262144, 1e-5, rotary=_HALF_ROTATED, writes_head_dim=False),
        Rule(_read_indices, _write_indices),
        *_MAMBA_OF_PAIRS,
        biases(mlp=None),
    ),
    ends=FINAL_LAYERNORM,
    layer=tuple(
        replace(module, per_layer=2)
        for module in (
            *_mixers_of_pairs("pre_ff_layernorm"),
            *modules(
                f"{_OURS}mlp.",
                f"{_GRANITE}feed_forward.",
                ("mlp", "up", "gate_proj up_proj", HALVES),
                ("mlp", "down", "down_proj"),
                only_in=lambda spec: spec.ffn_size is not None,
            ),
        )
    ),
    other_names={},
    without_effect=("mamba_chunk_size", "num_logits_to_keep", "attn_rotary_emb"),
)
