"""Nemotron-H: each layer has one block, which is Mamba-2, attention, an MLP or experts.

Shapes: g groups, r heads of a group, p head size, d state size. The rows of Mamba-2's input projection are
grouped here, ``[g, 2 r p + 2 d + r, ...]``; theirs are the gates of all groups, then x, B, C and time steps.
"""

from __future__ import annotations

from dataclasses import replace

from megalite.config import ModelConfig
from megalite.config.model.recurrence import MambaSpec
from megalite.frontends.huggingface.experts import (
    SEPARATE,
    SHARED_WIDTH,
    biased_scores,
    experts,
    has_experts,
)
from megalite.frontends.huggingface.family import (
    OUTPUT,
    QKV,
    VOCABULARY,
    Family,
    Transform,
    by_kind,
    modules,
    with_kernel_dim,
)
from megalite.frontends.huggingface.settings import (
    Fields,
    HFSettings,
    Rule,
    activation,
    fixed,
    only,
    setting,
    switch,
    where,
)
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
            lambda hf, fields: "E" in fields["hybrid_override_pattern"],
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
        *modules(
            _OURS + "mamba.",
            _MIXER,
            ("mamba", "in_projection", "in_proj", _PROJECTED),
            ("vector", "convolution.weight", "conv1d.weight", with_kernel_dim(_MIXED)),
            ("vector", "convolution.bias", "conv1d.bias", _MIXED),
            *(("vector", name, name) for name in ("A_log", "D", "dt_bias")),
            ("vector", "norm", "norm.weight"),
            ("mamba", "projection", "out_proj"),
            only_in=lambda spec: isinstance(spec.mixer, MambaSpec),
        ),
        *modules(
            _OURS + "attention.",
            _MIXER,
            ("qkv", "qkv", "q_proj k_proj v_proj", QKV),
            ("attention_output", "projection", "o_proj"),
            only_in=lambda spec: spec.attention is not None,
        ),
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
