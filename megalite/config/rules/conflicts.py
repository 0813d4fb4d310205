"""Pairs of settings that exclude each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from megalite.config.config import Config
from megalite.config.data import DOCUMENT_OPTIONS
from megalite.config.fields import config_fields, value_of, without_effect
from megalite.config.fp8 import FP8_BLOCKS
from megalite.config.model.attention import KERNEL_FEATURES
from megalite.config.model.feed_forward import GATED_ACTIVATIONS
from megalite.config.model.recurrence import HAS_MAMBA
from megalite.config.option import ABOVE_ONE, Range, Setting, flag_of, flag_with_value, other_than
from megalite.utils.errors import Problem

_Settings = str | Setting | tuple[str | Setting, ...]


class Conflict(NamedTuple):
    """Two settings that exclude each other, and why, with what to pass instead."""

    one: Setting
    other: Setting
    why: str


def _exclude(ones: _Settings, others: _Settings, why: str) -> Iterator[Conflict]:
    """Yield the conflict of every pair of one or more settings and others; a name is a field that is set."""
    for one, other in itertools.product(_listed(ones), _listed(others)):
        yield Conflict(one, other, why)


def _listed(settings: _Settings) -> list[Setting]:
    several = (settings,) if isinstance(settings, str | Setting) else settings
    return [Setting(each) if isinstance(each, str) else each for each in several]


def _recomputes(*modules: str) -> Setting:
    """Return the setting that recomputes one of these modules."""
    return Setting("recompute_modules", Range(lambda found: bool({*modules} & {*found}), ""))


_AUTO_LAYOUT = Setting("layout", ("auto",))
_EXPERTS = Setting("num_experts", ABOVE_ONE)
_BERT = Setting("architecture", ("bert",))
_DELTA_NET = Setting("recurrent_mixer", other_than("none"))
_LATENTS = Setting("multi_latent_attention")
_AS_VALUES = Setting("keys_as_values", other_than("none"))
_RING = Setting("cp_comm_type", Range(lambda types: "p2p" in str(types), "with p2p"))
_OTHER_THAN_RING = Setting(
    "cp_comm_type", Range(lambda types: types not in ("p2p", ("p2p",) * len(types)), "other than p2p")
)
_FULL_ATTENTION = (
    "full_attention_kv_channels",
    "full_attention_query_groups",
    Setting("keys_as_values", ("full_attention",)),
)
_TENSORWISE = Setting("fp8_recipe", ("tensorwise",))
_OFFLOADS = ("optimizer_cpu_offload", "optimizer_nvme_offload")
_PACKS = Setting("document_packing", ("best_fit",))
_WINDOWS = Setting("sample_order", ("windows",))

CONFLICTS = (
    # The optimizer
    *_exclude(
        _OFFLOADS,
        (Setting("exp_avg_dtype", other_than("fp32")), Setting("exp_avg_sq_dtype", other_than("fp32"))),
        ": offloaded moments are in fp32; remove one",
    ),
    # The layout
    *_exclude(_AUTO_LAYOUT, "emulate", ", which cannot be planned: pass the layout, or remove --emulate"),
    *_exclude(
        _AUTO_LAYOUT,
        "dry_run",
        ", which has no hardware to choose for: pass the layout that `megalite plan --layout auto` prints",
    ),
    *_exclude(_AUTO_LAYOUT, "verify_layouts", ", which names its layouts: remove --layout auto"),
    *_exclude(
        _AUTO_LAYOUT,
        Setting("global_batch_size", (None,)),
        ", whose default depends on the layout: pass the samples of an optimizer step",
    ),
    *_exclude(
        ("qk_clip", "compile"),
        _RING,
        " is not supported: pass --cp-comm-type all_gather or a2a, or remove the other",
    ),
    *_exclude(
        "dynamic_context_parallel",
        _OTHER_THAN_RING,
        ", whose messages do not depend on documents: pass --cp-comm-type p2p",
    ),
    # Recomputation
    *_exclude(_recomputes("mlp_act"), _EXPERTS, ": mlp_act is a part of an MLP; pass mlp"),
    *_exclude(
        _recomputes("layernorm", "mlp"),
        (Setting("norm_position", ("output", "post")), "parallel_shared_norm"),
        ", whose norms' outputs are kept for other blocks: pass core_attn or mlp_act, or "
        "--recompute-granularity full",
    ),
    *_exclude(
        _recomputes("mla_up_proj"), Setting("multi_latent_attention", (False,)), ": pass core_attn instead"
    ),
    *_exclude(
        _recomputes("mlp", "mlp_act"),
        Setting("mlp_chunks", ABOVE_ONE),
        ", which recomputes the MLP: remove mlp and mlp_act from --recompute-modules",
    ),
    # Attention
    *(
        Conflict(
            setting,
            Setting("attention_backend", other_than("auto", *backends)),
            f", which {lack}: pass --attention-backend auto, or {without}",
        )
        for setting, backends, lack, without, _ in KERNEL_FEATURES
    ),
    *_exclude(
        Setting("qk_layernorm_width", ("all_heads",)),
        Setting("normalization", other_than("RMSNorm")),
        ": pass --normalization RMSNorm, or --qk-layernorm-width head",
    ),
    *_exclude(
        _FULL_ATTENTION,
        Setting("window_attn_skip_freq", (None,)),
        ": it distinguishes layers with and without a window; pass --window-size and this too, or remove it",
    ),
    *_exclude("window_attn_skip_freq", Setting("window_size", (None,)), ": pass both, or remove it"),
    *_exclude(
        "num_kv_shared_layers",
        (_DELTA_NET, "hybrid_override_pattern", "mtp_num_layers"),
        ": no keys are shared there; remove one",
    ),
    *_exclude(
        "yarn_mscale",
        Setting("yarn_mscale_all_dim", (None,)),
        ": they have an effect only together; pass both",
    ),
    *_exclude(
        "yarn_mscale_all_dim",
        Setting("yarn_mscale", (None,)),
        ": they have an effect only together; pass both",
    ),
    # Attention with QK-clip
    *_exclude(
        "qk_clip", ("qk_layernorm", "clip_qkv"), ", which bounds the scores itself: remove one of them"
    ),
    *_exclude("qk_clip", _AS_VALUES, ": scaled keys would scale the values; remove one of them"),
    *_exclude(
        "qk_clip",
        "num_kv_shared_layers",
        ": the scores of several layers depend on the same keys; remove one",
    ),
    *_exclude("qk_clip", "compile", " is not supported: remove one of them"),
    *_exclude(
        "qk_clip",
        _OFFLOADS,
        ": weights are only scaled on the device; pass --zero-stage 1 to shard the state instead",
    ),
    # Multi-latent attention
    *_exclude(
        _LATENTS,
        Setting("position_embedding_type", other_than("rope")),
        ": pass --position-embedding-type rope",
    ),
    *_exclude(
        "add_bias_linear",
        _LATENTS,
        ", whose projections from latents have no biases: pass --disable-bias-linear",
    ),
    *_exclude(
        Setting("qk_layernorm_width", other_than("head")),
        _LATENTS,
        ", where --qk-layernorm normalizes the latents: remove it",
    ),
    *_exclude("attention_output_gate", _LATENTS, ": its queries have no gates; remove it"),
    *_exclude(Setting("rotary_percent", other_than(1.0)), _LATENTS, ": pass --qk-pos-emb-head-dim instead"),
    *_exclude("num_kv_shared_layers", _LATENTS, ", whose layers share no keys; remove it"),
    *_exclude(_AS_VALUES, _LATENTS, ", whose values are no keys; remove it"),
    *_exclude("value_layernorm", _LATENTS, ", whose values have no norm; remove it"),
    *_exclude("full_attention_kv_channels", _LATENTS, ": all layers have heads of one size; remove it"),
    *_exclude("full_attention_query_groups", _LATENTS, ": each head has its own keys; remove it"),
    *_exclude("clip_qkv", _LATENTS, ", whose keys and values are latents; remove it"),
    *_exclude("qk_clip", _LATENTS, ", whose keys have a part that all heads share; remove it"),
    *_exclude("mup_base_width", _LATENTS, ": muP has no rule for latents; remove it"),
    *_exclude(
        _TENSORWISE, _LATENTS, ": latents have no scale for a tensor; pass --fp8-recipe blockwise or mxfp8"
    ),
    # Recurrent layers
    *_exclude("compile", (_DELTA_NET, HAS_MAMBA), ": recurrences are not compiled; remove --compile"),
    *_exclude("fp8_format", (_DELTA_NET, HAS_MAMBA), ": its decays need more than 8 bits; remove it"),
    *_exclude("mup_base_width", (_DELTA_NET, HAS_MAMBA), ": muP has no rule for its decays; remove it"),
    *_exclude(
        ("linear_attention_freq", "moe_layer_freq", "no_rope_freq", "window_size", _DELTA_NET),
        "hybrid_override_pattern",
        ", which names each layer: remove one",
    ),
    *_exclude(
        ("parallel_residual", Setting("norm_position", other_than("pre"))),
        "hybrid_override_pattern",
        ", whose layers have one block with a norm before it: remove it",
    ),
    # Experts
    *_exclude("mup_base_width", _EXPERTS, ": muP has no rule for the router; remove it"),
    *_exclude(
        Setting("mlp_chunks", ABOVE_ONE),
        _EXPERTS,
        ": experts compute all their tokens at once; remove it, and pass --recompute-granularity selective "
        "with --recompute-modules mlp",
    ),
    *_exclude(
        "moe_beside_mlp",
        Setting("norm_position", other_than("sandwich")),
        ", which does not normalize outputs of blocks: pass --norm-position sandwich, or remove it",
    ),
    *_exclude(
        "moe_shared_expert_intermediate_size",
        "moe_beside_mlp",
        ", whose MLP computes all tokens: remove one",
    ),
    *_exclude(
        "moe_shared_expert_gate",
        Setting("moe_shared_expert_intermediate_size", (None,)),
        ": pass it too, or remove the gate",
    ),
    *_exclude(
        ("moe_shared_expert_gate", "moe_latent_size"),
        ("add_bias_linear", "add_mlp_bias"),
        ": it has no biases beside it; pass --disable-bias-linear without --add-mlp-bias",
    ),
    *_exclude(
        "moe_router_num_groups",
        Setting("moe_router_group_topk", (None,)),
        ": they have an effect only together; pass both, or remove it",
    ),
    *_exclude(
        "moe_router_group_topk",
        Setting("moe_router_num_groups", (None,)),
        ": they have an effect only together; pass both, or remove it",
    ),
    *_exclude(
        "moe_router_enable_expert_bias",
        Setting("moe_router_score_function", other_than("sigmoid")),
        ": the bias adds to scores of sigmoid; pass it, or remove the bias",
    ),
    *_exclude(
        Setting("moe_imbalance", other_than(1.0)),
        "moe_router_force_load_balancing",
        ", which makes tokens even: remove one",
    ),
    *_exclude(
        "replay_routing_from",
        "moe_router_force_load_balancing",
        ": both select the experts of tokens; remove one",
    ),
    *_exclude("record_routing", "replay_routing_from", ": the run would record what it replays; remove one"),
    *_exclude(
        ("record_routing", "replay_routing_from"),
        "seq_length_schedule",
        ", which cuts samples: files have the experts of whole samples; remove one",
    ),
    # BERT
    *_exclude(("fim_rate", "sft", _PACKS, *DOCUMENT_OPTIONS), _BERT, ": it is an option of GPT; remove it"),
    *_exclude(
        ("window_size", Setting("position_embedding_type", ("alibi",))),
        _BERT,
        ", whose attention is bidirectional: remove it",
    ),
    *_exclude(_DELTA_NET, _BERT, ", whose tokens also see later ones: remove it"),
    *_exclude("hybrid_override_pattern", _BERT, ", whose layers have two blocks: remove it"),
    *_exclude("mup_base_width", _BERT, ", whose heads muP does not scale here: remove it"),
    *_exclude(("mtp_num_layers", "eval_tasks"), _BERT, ", which does not predict next tokens: remove it"),
    *_exclude("hidden_size_per_layer_input", _BERT, " is not supported: remove one"),
    # Other parts of the model
    *_exclude(
        "mup_base_width",
        Setting("muon_scale_mode", ("spectral",)),
        ", whose updates grow with the width: pass --muon-scale-mode unit_rms_norm or shape_scaling",
    ),
    *_exclude(
        "mup_base_head_dim",
        "query_pre_attn_scalar",
        ", which also sets the scale of attention scores: remove one",
    ),
    *_exclude(
        "mtp_num_layers",
        Setting("position_embedding_type", ("learned_absolute",)),
        ", whose positions are in the embedding: pass rope, alibi or none",
    ),
    *_exclude(
        "mtp_num_layers",
        "embed_layernorm",
        ": its modules normalize the embedding; remove one of them",
    ),
    *_exclude(
        "hidden_size_per_layer_input",
        Setting("norm_position", other_than("sandwich")),
        " is not supported: pass --norm-position sandwich",
    ),
    *_exclude(
        "hidden_size_per_layer_input",
        Setting("activation", other_than(*GATED_ACTIVATIONS)),
        ": its gate has the function of a gated activation; pass a gated one, such as geglu or swiglu",
    ),
    *_exclude(
        "hidden_size_per_layer_input",
        ("mtp_num_layers", "mup_base_width"),
        " is not supported: remove one",
    ),
    # Precision
    *_exclude(
        Setting("fp8_format", ("e2m1",)),
        Setting("fp8_recipe", other_than("nvfp4")),
        ": for 4 bits pass --fp4-format e2m1 --fp4-recipe nvfp4",
    ),
    *_exclude(
        Setting("fp8_format", other_than("e2m1")),
        Setting("fp8_recipe", ("nvfp4",)),
        ": for 4 bits pass --fp4-format e2m1 --fp4-recipe nvfp4",
    ),
    *_exclude(
        Setting("fp8_recipe", tuple(FP8_BLOCKS)),
        Setting("mlp_chunks", ABOVE_ONE),
        ", which cuts a sample within blocks of its tokens: remove it, or pass --fp8-recipe tensorwise",
    ),
    *_exclude(
        "fp8_param_gather",
        Setting("fp8_recipe", other_than("tensorwise")),
        ", whose blocks the ranks that share a weight may cut: remove it, or pass --fp8-recipe tensorwise",
    ),
    *_exclude("fp8_param_gather", "compile", ", whose graphs round weights of 16 bits: remove one"),
    *_exclude("compile", "emulate", ", whose operators are not compiled: remove --compile"),
    *_exclude(
        Setting("fp8_recipe", tuple(FP8_BLOCKS)),
        "dynamic_context_parallel",
        ", which cuts a sample within blocks of its tokens: remove it, or pass --fp8-recipe tensorwise",
    ),
    *_exclude(
        "grad_communication_dtype",
        Setting("params_dtype", ("fp64",)),
        ", which is meant to verify layouts: remove --grad-communication-dtype",
    ),
    *_exclude(
        Setting("grad_communication_dtype", ("fp16",)),
        Setting("params_dtype", ("fp32", "bf16")),
        ": without fp16 weights, no loss scale keeps gradients within the range of fp16; pass "
        "--grad-communication-dtype bf16",
    ),
    # The optimizer and its schedules
    *_exclude(
        Setting("optimizer", ("muon",)),
        _OFFLOADS,
        ": Muon's state is not offloaded; pass --zero-stage 1 to shard it instead, or --optimizer adam",
    ),
    *_exclude(
        "optimizer_cpu_offload",
        "optimizer_nvme_offload",
        ", which offloads the same state: pass only one of them",
    ),
    *_exclude(
        "async_save",
        "optimizer_nvme_offload",
        ", which keeps the optimizer state out of host memory, where --async-save copies it: remove "
        "--async-save, or pass --optimizer-cpu-offload instead",
    ),
    *_exclude(
        "decoupled_min_lr",
        Setting("decoupled_lr", (None,)),
        ": pass the peak rate too, or remove --decoupled-min-lr",
    ),
    *_exclude(
        (Setting("start_weight_decay", other_than(None)), Setting("end_weight_decay", other_than(None))),
        Setting("weight_decay_incr_style", ("constant",)),
        ": pass --weight-decay, or --weight-decay-incr-style linear or cosine",
    ),
    *_exclude(
        Setting("weight_decay_incr_style", other_than("constant")),
        (Setting("start_weight_decay", (None,)), Setting("end_weight_decay", (None,))),
        ": pass it too",
    ),
    *_exclude(
        Setting("lr_step_timing", ("deepspeed",)),
        "train_samples",
        ": it counts updates, pass --train-iters",
    ),
    *_exclude(
        Setting("lr_step_timing", ("deepspeed",)),
        Setting("lr_decay_style", other_than("constant", "linear", "cosine")),
        ": choose one of constant, linear, cosine",
    ),
    *_exclude(
        Setting("lr_warmup_fraction", other_than(None)),
        ("lr_warmup_iters", "lr_warmup_samples"),
        ": both set the warm-up; remove one",
    ),
    # The length of the run and of its samples
    *_exclude("train_iters", "train_samples", ", which also sets the length of the run: remove one"),
    *(
        conflict
        for length, unit, other in (
            ("train_iters", "iters", "samples"),
            ("train_samples", "samples", "iters"),
        )
        for name in ("lr_decay", "lr_warmup", "lr_wsd_decay", "weight_decay_incr")
        for conflict in _exclude(
            f"{name}_{other}",
            length,
            f": a run is counted in iterations or in samples; pass {flag_of(f'{name}_{unit}')}",
        )
    ),
    *_exclude(
        "step_batch_size_schedule",
        "rampup_batch_size",
        ", which contradicts it: remove one",
    ),
    *_exclude("full_validation", "mock_data", ", whose random tokens never end: remove it"),
    *_exclude("seq_length_schedule", (_BERT, "sft"), ", whose samples it would cut: remove it"),
    # Data and checkpoints
    *(
        conflict
        for split in ("train", "valid", "test")
        for conflict in _exclude(
            f"{split}_weighted_split_paths",
            f"{split}_weighted_split_paths_path",
            ": both set the same option; remove one",
        )
    ),
    *_exclude(DOCUMENT_OPTIONS, "sft", ", which separates conversations by itself: remove it"),
    *_exclude(DOCUMENT_OPTIONS, _PACKS, ", which separates documents by itself: remove it"),
    *_exclude(
        (_WINDOWS, "data_phases"),
        ("sft", _PACKS, _BERT),
        ", whose samples are no windows of a corpus: remove one",
    ),
    *_exclude("fim_rate", ("sft", _PACKS), ": it rearranges text; remove --fim-rate"),
    *_exclude("sft", _PACKS, ": --sft packs conversations by itself; remove --document-packing"),
    *_exclude(
        "override_opt_param_scheduler",
        "use_checkpoint_opt_param_scheduler",
        ": one resumes with the flags' schedule, the other with the checkpoint's; remove one",
    ),
    *_exclude(
        "use_checkpoint_args",
        Setting("load", (None,)),
        ", from which it reads the model: pass it, or remove both",
    ),
    *_exclude(
        "non_persistent_save_interval",
        Setting("non_persistent_local_ckpt_dir", (None,)),
        ": pass a folder on each node's disk or in its memory, for example /dev/shm/megalite",
    ),
    *_exclude(
        "non_persistent_save_interval",
        Setting("save", (None,)),
        ": pass the folder of persistent checkpoints, which the run falls back on",
    ),
    # Profilers
    *_exclude("profile", "profile_execution", ": both start the profiler; remove one"),
    *_exclude(
        ("profile_execution", "use_pytorch_profiler"),
        Setting("tensorboard_dir", (None,)),
        ", where the trace is written: pass it too",
    ),
)
"""Settings that exclude each other. A setting without effect excludes nothing."""


def conflicts(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Refuse settings that exclude each other."""
    found = [each for each in CONFLICTS if _is_met(each.one, config) and _is_met(each.other, config)]
    unused = without_effect(config_fields(), config.values()) if found else {}
    for one, other, why in found:
        if unused.keys().isdisjoint((one.field, other.field)):
            is_missing = value_of(other.field, config) in (None, False)
            second = f"without {flag_of(other.field)}" if is_missing else f"with {_shown(other, config)}"
            yield Problem((one.field, other.field), f"{_shown(one, config)} {second}{why}")


def _is_met(setting: Setting, config: Config) -> bool:
    return setting.is_met(value_of(setting.field, config))


def _shown(setting: Setting, config: Config) -> str:
    return flag_with_value(setting.field, value_of(setting.field, config))
