"""Models of the layout table, their runs in layouts, and on one rank, with which others are compared."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from megalite.config import Config, DataConfig, OptimizerConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.observe.verify.layouts import Layout
from megalite.observe.verify.record_run import RunRecord
from tests.live_ranks import record_run

NUM_ITERATIONS = 2  # the second one has weights and moments of the first
GLOBAL_BATCH_SIZE = 8
MICRO_BATCH_SIZE = 2
MODELS = ("gpt-tiny", "bloom-tiny", "llama-tiny")
WINDOWED = "gpt-tiny, window"
"""Layers 1, 2 and 4 of 4 have a window."""
MIXTRAL, WIDE_EXPERTS = "llama-tiny, experts", "llama-tiny, twelve experts"
DROPPING = "llama-tiny, dropped tokens"
HYBRID = "llama-tiny, qwen3-next"
"""Layers 1, 2 and 4 of 4 have Gated DeltaNet, and layers 1, 3 and 4 experts."""
LFM2 = "llama-tiny, lfm2"
OLMO_HYBRID = "llama-tiny, olmo-hybrid"
"""Layers 1, 2 and 4 of 4 have Gated DeltaNet with rates up to 2, and norms before their blocks."""
KIMI = "llama-tiny, kimi-linear"
"""Layers 1, 2 and 4 of 4 have Kimi Delta Attention, and layer 3 multi-latent attention without rotation."""
FALCON = "nemotron-h-tiny, falcon-h1"
NEMOTRON = "nemotron-h-tiny, own"
"""Layers with Mamba-2, attention, Mamba-2 and an MLP."""
BESIDE = "llama-tiny, experts beside MLPs"
COHERE = "gpt-tiny, cohere"
"""With xIELU, and norms after the rotation."""
LATENT, DEEPSEEK = "llama-tiny, latent", "llama-tiny, deepseek"
GPT_OSS = "llama-tiny, gpt-oss"
"""Experts, router and attention have biases."""
OWN_EMBEDDINGS = "llama-tiny, embeddings for each layer"
GEMMA4 = "llama-tiny, gemma 4"
"""4 key/value heads in layers with a window, and 1 in others: tp 2 cuts the first and shares the second. The
last 2 of 8 layers share keys and values of layers 4 and 5, and must be in one stage with them."""
SWITCHES: dict[str, dict[str, Any]] = {
    WINDOWED: {"window_size": (10, 0), "window_attn_skip_freq": (3,)},
    "llama-tiny, qwen": {
        **{"qk_layernorm": True, "add_qkv_bias": True, "kv_channels": 12, "rope_scaling": "llama3"},
        **{
            "add_attention_output_bias": True,
            "rope_scaling_factor": 4.0,
            "original_max_position_embeddings": 16,
            "no_rope_freq": (4,),
        },
    },
    "llama-tiny, olmo": {
        **{"qk_layernorm": True, "qk_layernorm_width": "all_heads", "norm_position": "output"},
        **{"rope_scaling": "yarn", "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5},
        "clip_qkv": 0.8,
    },
    "gpt-tiny, neox": {
        **{"position_embedding_type": "rope", "rotary_percent": 0.5, "rotary_interleaved": True},
        **{"parallel_residual": True, "qk_layernorm": True},
    },
    "gpt-tiny, gpt-j": {
        **{"position_embedding_type": "rope", "rotary_percent": 0.5, "rotary_interleaved": True},
        **{"parallel_residual": True, "parallel_shared_norm": True, "add_bias_linear": False},
        **{"add_mlp_bias": True, "add_output_bias": True, "untie_embeddings_and_output_weights": True},
    },
    COHERE: {
        **{"position_embedding_type": "rope", "rotary_percent": 0.5, "rotary_interleaved": True},
        **{"qk_layernorm": True, "qk_layernorm_after_rope": True, "add_norm_bias": False},
        **{"parallel_residual": True, "residual_multiplier": 0.5, "activation": "xielu"},
        "embedding_dropout": 0.2,
    },
    "llama-tiny, ernie": {
        **{"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 12, "moe_layer_freq": (0, 1, 1, 1)},
        **{"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.05},
        **{"moe_shared_expert_intermediate_size": 24, "residual_multiplier": 0.5},
    },
    "llama-tiny, gemma": {
        **{"activation": "geglu", "norm_position": "sandwich", "zero_centered_norms": True},
        **{"qk_layernorm": True, "embedding_multiplier": 8.0, "final_logit_softcapping": 3.0},
        **{"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 9.0, "window_size": (10, 0)},
        **{"window_attn_skip_freq": (2,), "window_rotary_base": 100.0},
    },
    GEMMA4: {
        **{"activation": "geglu", "norm_position": "sandwich", "query_pre_attn_scalar": 1.0},
        **{"qk_layernorm": True, "value_layernorm": True, "layer_output_scale": True},
        **{"num_layers": 8, "num_query_groups": 4, "full_attention_query_groups": 1, "kv_channels": 8},
        **{"full_attention_kv_channels": 12, "keys_as_values": "full_attention"},
        **{"num_kv_shared_layers": 2, "kv_shared_ffn_hidden_size": 96, "window_size": (10, 0)},
        **{"window_attn_skip_freq": (1, 1, 0, 1, 1, 0, 1, 0), "rope_scaling": "proportional"},
        **{"window_rope_scaling": False, "rotary_base": 500.0, "window_rotary_base": 100.0},
    },
    "gpt-tiny, nemotron": {
        **{"activation": "squared_relu", "zero_centered_norms": True, "logit_multiplier": 0.5},
        **{"attn_logit_softcapping": 2.0, "softmax_type": "off-by-one"},
    },
    GPT_OSS: {
        **{"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 40},
        **{"softmax_type": "learnable", "add_bias_linear": True, "attention_output_gate": True},
        **{"window_size": (10, 0), "window_attn_skip_freq": (2,), "z_loss_coeff": 0.1},
        **{"activation": "quick_geglu", "activation_func_clamp_value": 0.1, "glu_linear_offset": 1.0},
    },
    MIXTRAL: {
        **{"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 40, "moe_z_loss_coeff": 1e-2},
        **{"moe_layer_freq": (0, 1, 1, 0)},
    },
    WIDE_EXPERTS: {
        **{"num_experts": 12, "moe_router_topk": 4, "moe_ffn_hidden_size": 20},
        **{"moe_router_pre_softmax": True, "moe_shared_expert_intermediate_size": 16},
        **{"moe_shared_expert_gate": True, "moe_router_load_balancing_type": "global_aux_loss"},
    },
    DROPPING: {
        **{"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 40, "moe_input_jitter_eps": 0.1},
        **{"moe_expert_capacity_factor": 0.9, "mtp_num_layers": 1},
    },
    BESIDE: {
        **{"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 40, "moe_beside_mlp": True},
        **{"activation": "geglu", "norm_position": "sandwich", "layer_output_scale": True},
        **{"moe_layer_freq": (1, 0, 1, 1)},
    },
    "gpt-tiny, sigmoid": {
        **{"num_experts": 5, "moe_router_topk": 3, "moe_router_score_function": "sigmoid"},
        **{"add_bias_linear": False, "norm_position": "sandwich"},
        "moe_router_load_balancing_type": "aux_loss",
    },
    NEMOTRON: {
        **{"mamba_min_time_step": 0.01, "mamba_conv_kernel": 3, "mamba_bias": True, "add_mlp_bias": True},
        **{"init_method_std": 0.1, "mtp_num_layers": 1},
    },
    HYBRID: {
        **{"recurrent_mixer": "gated_delta_net", "linear_attention_freq": (3,), "linear_key_head_dim": 6},
        **{"linear_value_head_dim": 8, "linear_num_key_heads": 4, "linear_num_value_heads": 8},
        **{"zero_centered_norms": True, "attention_output_gate": True, "qk_layernorm": True},
        **{"rotary_percent": 0.5, "mtp_num_layers": 1, "num_experts": 8, "moe_ffn_hidden_size": 12},
        **{"moe_shared_expert_intermediate_size": 12, "moe_shared_expert_gate": True},
        "moe_layer_freq": (1, 0, 1, 1),
    },
    FALCON: {
        **{"hybrid_override_pattern": "B-B-", "position_embedding_type": "rope", "activation": "swiglu"},
        **{"mamba_norm": "before_gate", "mamba_multipliers": (1.5, 0.75, 1.25, 1.0, 0.5)},
        **{"mixer_multipliers": (0.5, 2.0), "mlp_multipliers": (1.5, 0.75), "init_method_std": 0.1},
    },
    OLMO_HYBRID: {
        **{"recurrent_mixer": "gated_delta_net", "linear_attention_freq": (3,), "linear_key_head_dim": 6},
        **{"linear_value_head_dim": 8, "linear_num_key_heads": 4, "linear_num_value_heads": 4},
        **{"linear_allow_neg_eigval": True, "linear_norm_epsilon": 1e-3, "linear_pre_norm": True},
        **{"norm_position": "output", "position_embedding_type": "none"},
    },
    KIMI: {
        **{
            "recurrent_mixer": "kimi_delta_attention",
            "linear_attention_freq": (3,),
            "linear_key_head_dim": 6,
        },
        **{"linear_num_key_heads": 4, "position_embedding_type": "none", "multi_latent_attention": True},
        **{"kv_lora_rank": 12, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 5},
        **{"num_query_groups": None, "qk_layernorm": True, "num_experts": 8, "moe_ffn_hidden_size": 12},
        **{"moe_layer_freq": (0, 1, 1, 1), "moe_shared_expert_intermediate_size": 12},
        **{"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        **{"moe_router_bias_update_rate": 0.05, "moe_router_load_balancing_type": "none"},
    },
    LFM2: {
        **{"recurrent_mixer": "gated_convolution", "linear_attention_freq": (3,), "qk_layernorm": True},
        "linear_conv_kernel_dim": 3,
    },
    "llama-tiny, mtp": {"mtp_num_layers": 2, "z_loss_coeff": 0.1, "moe_layer_freq": (0, 0, 0, 1)}
    | {"num_experts": 4, "moe_ffn_hidden_size": 40},
    "bloom-tiny, mtp": {"mtp_num_layers": 1, "embed_layernorm": False},
    "gpt-tiny, mup": {"mup_base_width": 24, "mup_base_head_dim": 5},
    LATENT: {
        **{"multi_latent_attention": True, "q_lora_rank": 20, "kv_lora_rank": 12, "qk_head_dim": 6},
        **{"qk_pos_emb_head_dim": 4, "v_head_dim": 5, "num_query_groups": None, "qk_layernorm": True},
        **{"rotary_interleaved": True, "rope_scaling": "yarn", "original_max_position_embeddings": 16},
        **{"yarn_mscale": 0.7, "yarn_mscale_all_dim": 0.9},
        **{"add_qkv_bias": True, "add_attention_output_bias": True},
    },
    DEEPSEEK: {
        **{"multi_latent_attention": True, "kv_lora_rank": 12, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4},
        **{"v_head_dim": 5, "num_query_groups": None, "num_experts": 8, "moe_router_topk": 2},
        **{
            "moe_ffn_hidden_size": 12,
            "moe_latent_size": 20,
            "moe_shared_expert_intermediate_size": 24,
            "moe_layer_freq": (0, 1, 1, 1),
        },
        **{"moe_router_score_function": "sigmoid", "moe_router_num_groups": 4, "moe_router_group_topk": 2},
        **{"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.05},
        **{"moe_router_topk_scaling_factor": 2.5, "mtp_num_layers": 1},
        "moe_router_load_balancing_type": "global_aux_loss",
    },
    "llama-tiny, qk-clip": {"qk_clip": True, "qk_clip_threshold": 0.005, "add_qkv_bias": True},
    OWN_EMBEDDINGS: {
        **{"activation": "geglu_exact", "norm_position": "sandwich", "layer_output_scale": True},
        **{"hidden_size_per_layer_input": 6, "embedding_multiplier": 8.0},
    },
}
"""Fields of models with other options than their preset."""
GEMMA4_E2B = "llama-tiny, gemma 4 e2b"
OF_ONE_STAGE: dict[str, dict[str, Any]] = {
    GEMMA4_E2B: {
        **{"activation": "geglu", "norm_position": "sandwich", "layer_output_scale": True},
        **{"hidden_size_per_layer_input": 6, "embedding_multiplier": 8.0},
        **{"num_kv_shared_layers": 2, "kv_shared_ffn_hidden_size": 96},
    },
}
"""Fields of models that an even pipeline cannot have: the last layers share keys of layers before them."""
THREE_HEADS: dict[str, dict[str, Any]] = {
    f"{model}, three heads": {
        **SWITCHES[model],
        **{"num_attention_heads": 3, "num_query_groups": 1, "kv_channels": 12, "ffn_hidden_size": 96},
        **more,
    }
    for model, more in (
        *(("llama-tiny, qwen", {}), ("llama-tiny, olmo", {}), ("llama-tiny, gemma", {})),
        (GPT_OSS, {"moe_ffn_hidden_size": 42}),
        *((each, {}) for each in ("llama-tiny, qk-clip", WINDOWED, "gpt-tiny, neox", "gpt-tiny, gpt-j")),
        (COHERE, {}),
        *(("gpt-tiny, nemotron", {}), (LATENT, {"num_query_groups": None, "kv_channels": None})),
        (GEMMA4, {"num_query_groups": 3}),
        (HYBRID, {"linear_num_key_heads": 3, "linear_num_value_heads": 6}),
    )
}
"""Fields of models that tp 3 cuts: one key/value head for three ranks, where a model shares such heads."""
MUON = "llama-tiny, muon"
AVERAGED = (MUON, "llama-tiny, olmo", "gpt-tiny, neox")
"""Models with averages of their weights, which are compared like the weights."""
WITH_DROPOUT = {
    *(
        "gpt-tiny",
        WINDOWED,
        "gpt-tiny, neox",
        "gpt-tiny, nemotron",
        COHERE,
        GPT_OSS,
        "gpt-tiny, sigmoid",
    ),
    *(LATENT, GEMMA4, GEMMA4_E2B, "gpt-tiny, gpt-j", HYBRID, LFM2, FALCON, NEMOTRON, "llama-tiny, mtp"),
}


def config_of(model: str, dtype: str, corpus: str) -> Config:
    dropout, preset = 0.1 if model in WITH_DROPOUT else 0.0, model.partition(", ")[0]
    return Config(
        model=replace(
            PRESETS[preset],
            **{**SWITCHES, **OF_ONE_STAGE, **THREE_HEADS}.get(model, {}),
            hidden_dropout=dropout,
            attention_dropout=dropout,
            vocab_size=2048,
            params_dtype=dtype,
            seq_length=64,
        ),
        optimizer=OptimizerConfig(
            optimizer="muon" if model == MUON else "adam",
            muon_extra_scale_factor=0.2 if model == MUON else 1.0,
            ema_decay=0.9 if model in AVERAGED else None,
            lr=3e-3,
            min_lr=3e-4,
            lr_decay_style="cosine",
            lr_warmup_fraction=0.2,
        ),
        data=DataConfig(data_path=(corpus,), split="949,50,1"),
        training=TrainingConfig(
            micro_batch_size=MICRO_BATCH_SIZE,
            global_batch_size=GLOBAL_BATCH_SIZE,
            train_iters=3,
            eval_iters=0,
        ),
    )


@functools.cache
def reference(model: str, dtype: str, corpus: str) -> RunRecord:
    return run_alone(config_of(model, dtype, corpus), NUM_ITERATIONS)


def run_alone(config: Config, num_iterations: int) -> RunRecord:
    """Train on one rank, in one pass over each global batch unless the model depends on microbatches."""
    return record_run(_with_micro_batch_size(config, config.training.global_batch_size), num_iterations, 1)


def config_in(name: str, config: Config) -> Config:
    """Return the config of the same run in a layout.

    A rank that reads all samples, without a pipeline, has two microbatches, unless the layout or the model
    says otherwise: more take longer and prove no more.
    """
    layout, global_batch_size = Layout.parse(name), config.training.global_batch_size
    assert global_batch_size is not None
    if layout.mbs is None and layout.num_sample_ranks == layout.size("pp") == 1:
        config = _with_micro_batch_size(config, global_batch_size // 2)
    return layout.apply(config, global_batch_size)


def run_in(name: str, config: Config, num_iterations: int) -> RunRecord:
    """Train in a layout."""
    return record_run(config_in(name, config), num_iterations, Layout.parse(name).world_size)


def _with_micro_batch_size(config: Config, size: int | None) -> Config:
    if config.model.depends_on_micro_batch:
        return config
    return replace(config, training=replace(config.training, micro_batch_size=size))
