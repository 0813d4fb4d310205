"""Pairs of settings that exclude each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from megalite.config.config import Config
from megalite.config.fields import config_fields, fields_by_name, without_effect
from megalite.config.option import ABOVE_ONE, Range, Setting, flag_of, flag_with_value, other_than
from megalite.utils.errors import Problem


class Conflict(NamedTuple):
    """Two settings that exclude each other, and why, with what to pass instead."""

    one: Setting
    other: Setting
    why: str


def _both(one: str | Setting, other: str | Setting, why: str) -> Conflict:
    """Return the conflict of two settings; a name alone is a field that is set."""
    first, second = (Setting(each) if isinstance(each, str) else each for each in (one, other))
    return Conflict(first, second, why)


_AUTO_LAYOUT = Setting("layout", ("auto",))
_EXPERTS = Setting("num_experts", ABOVE_ONE)
_BERT = Setting("architecture", ("bert",))
_MAMBA = Setting("hybrid_override_pattern", Range(lambda pattern: "M" in str(pattern), "with M"))
_DELTA_NET = Setting("recurrent_mixer", other_than("none"))
_LATENTS = Setting("multi_latent_attention")
_OWN_BACKENDS = ("auto", "triton", "unfused", "local")  # with counter-based dropout, capped scores and sinks

CONFLICTS = (
    # The layout
    _both(
        _AUTO_LAYOUT, "fp8_format", ", whose speed cannot be planned: pass the layout, or remove --fp8-format"
    ),
    _both(
        _AUTO_LAYOUT,
        "dry_run",
        ", which has no hardware to choose for: pass the layout that `megalite plan --layout auto` prints",
    ),
    _both(_AUTO_LAYOUT, "verify_layouts", ", which names its layouts: remove --layout auto"),
    _both(
        _AUTO_LAYOUT,
        Setting("global_batch_size", (None,)),
        ", whose default depends on the layout: pass the samples of an optimizer step",
    ),
    # Attention
    _both(
        Setting("attention_backend", other_than(*_OWN_BACKENDS)),
        "attention_dropout",
        ": only triton and unfused have dropout that is the same in any layout; pass --attention-backend "
        "auto, or --attention-dropout 0",
    ),
    _both(
        "attn_logit_softcapping",
        Setting("attention_backend", other_than(*_OWN_BACKENDS, "flex")),
        ", which cannot cap scores: pass --attention-backend auto, or remove one",
    ),
    _both(
        Setting("softmax_type", other_than("vanilla")),
        Setting("attention_backend", other_than(*_OWN_BACKENDS, "flex")),
        ", which has no sinks in its softmax: pass --attention-backend auto, or remove one",
    ),
    _both(
        Setting("qk_layernorm_width", ("all_heads",)),
        Setting("normalization", other_than("RMSNorm")),
        ": pass --normalization RMSNorm, or --qk-layernorm-width head",
    ),
    _both("window_size", _BERT, ", whose attention is bidirectional: remove it"),
    _both("window_attn_skip_freq", Setting("window_size", (None,)), ": pass both, or remove it"),
    *(
        _both("num_kv_shared_layers", other, ": no keys are shared there; remove one")
        for other in (_DELTA_NET, "hybrid_override_pattern", "mtp_num_layers")
    ),
    # Attention with QK-clip
    *(
        _both("qk_clip", name, ", which bounds the scores itself: remove one of them")
        for name in ("qk_layernorm", "clip_qkv")
    ),
    _both(
        "qk_clip",
        Setting("attention_backend", other_than("auto", "unfused", "local")),
        ", which does not return the largest scores: pass --attention-backend auto",
    ),
    _both(
        "qk_clip",
        Setting("keys_as_values", other_than("none")),
        ": scaled keys would scale the values; remove one of them",
    ),
    _both(
        "qk_clip",
        "num_kv_shared_layers",
        ": the scores of several layers depend on the same keys; remove one",
    ),
    _both("qk_clip", "compile", " is not supported: remove one of them"),
    *(
        _both(
            "qk_clip",
            name,
            ": weights are only scaled on the device; pass --zero-stage 1 to shard the state instead",
        )
        for name in ("optimizer_cpu_offload", "optimizer_nvme_offload")
    ),
    # Multi-latent attention
    _both(
        _LATENTS,
        Setting("position_embedding_type", other_than("rope")),
        ": pass --position-embedding-type rope",
    ),
    _both(
        "add_bias_linear",
        _LATENTS,
        ", whose projections from latents have no biases: pass --disable-bias-linear",
    ),
    _both(
        Setting("qk_layernorm_width", other_than("head")),
        _LATENTS,
        ", where --qk-layernorm normalizes the latents: remove it",
    ),
    _both("attention_output_gate", _LATENTS, ": its queries have no gates; remove it"),
    _both(Setting("rotary_percent", other_than(1.0)), _LATENTS, ": pass --qk-pos-emb-head-dim instead"),
    _both("num_kv_shared_layers", _LATENTS, ", whose layers share no keys; remove it"),
    _both(Setting("keys_as_values", other_than("none")), _LATENTS, ", whose values are no keys; remove it"),
    _both("value_layernorm", _LATENTS, ", whose values have no norm; remove it"),
    _both("full_attention_kv_channels", _LATENTS, ": all layers have heads of one size; remove it"),
    _both("full_attention_query_groups", _LATENTS, ": each head has its own keys; remove it"),
    _both("clip_qkv", _LATENTS, ", whose keys and values are latents; remove it"),
    _both("qk_clip", _LATENTS, ", whose keys have a part that all heads share; remove it"),
    _both("mup_base_width", _LATENTS, ": muP has no rule for latents; remove it"),
    _both("fp8_format", _LATENTS, ": latents have no 8-bit GEMMs; remove it"),
    # Recurrent layers
    *(
        conflict
        for mixer in (_DELTA_NET, _MAMBA)
        for conflict in (
            _both("compile", mixer, ": recurrences are not compiled; remove --compile"),
            _both("fp8_format", mixer, ": its decays need more than 8 bits; remove it"),
            _both("mup_base_width", mixer, ": muP has no rule for its decays; remove it"),
        )
    ),
    _both(_DELTA_NET, _BERT, ", whose tokens also see later ones: remove it"),
    *(
        _both(name, "hybrid_override_pattern", ", which names each layer: remove one")
        for name in ("linear_attention_freq", "moe_layer_freq", "no_rope_freq", "window_size", _DELTA_NET)
    ),
    *(
        _both(
            other, "hybrid_override_pattern", ", whose layers have one block with a norm before it: remove it"
        )
        for other in ("parallel_residual", Setting("norm_position", other_than("pre")))
    ),
    _both("hybrid_override_pattern", _BERT, ", whose layers have two blocks: remove it"),
    # Experts
    _both("fp8_format", _EXPERTS, ": experts have no 8-bit GEMMs; remove it"),
    _both("mup_base_width", _EXPERTS, ": muP has no rule for the router; remove it"),
    _both(
        Setting("mlp_chunks", ABOVE_ONE),
        _EXPERTS,
        ": experts compute all their tokens at once; remove it, and pass --recompute-granularity selective "
        "with --recompute-modules mlp",
    ),
    _both(
        "moe_beside_mlp",
        Setting("norm_position", other_than("sandwich")),
        ", which does not normalize outputs of blocks: pass --norm-position sandwich, or remove it",
    ),
    _both(
        "moe_shared_expert_intermediate_size",
        "moe_beside_mlp",
        ", whose MLP computes all tokens: remove one",
    ),
    _both(
        "moe_shared_expert_gate",
        Setting("moe_shared_expert_intermediate_size", (None,)),
        ": pass it too, or remove the gate",
    ),
    _both(
        "moe_router_enable_expert_bias",
        Setting("moe_router_score_function", other_than("sigmoid")),
        ": the bias adds to scores of sigmoid; pass it, or remove the bias",
    ),
    _both(
        Setting("moe_imbalance", other_than(1.0)),
        "moe_router_force_load_balancing",
        ", which makes tokens even: remove one",
    ),
    _both(
        "replay_routing_from",
        "moe_router_force_load_balancing",
        ": both select the experts of tokens; remove one",
    ),
    _both("record_routing", "replay_routing_from", ": the run would record what it replays; remove one"),
    *(
        _both(
            name,
            "seq_length_schedule",
            ", which cuts samples: files have the experts of whole samples; remove one",
        )
        for name in ("record_routing", "replay_routing_from")
    ),
    # Other parts of the model
    _both("mup_base_width", _BERT, ", whose heads muP does not scale here: remove it"),
    _both(
        "mup_base_width",
        Setting("muon_scale_mode", ("spectral",)),
        ", whose updates grow with the width: pass --muon-scale-mode unit_rms_norm or shape_scaling",
    ),
    _both(
        "mup_base_head_dim",
        "query_pre_attn_scalar",
        ", which also sets the scale of attention scores: remove one",
    ),
    _both("mtp_num_layers", _BERT, ", which does not predict next tokens: remove it"),
    _both(
        "mtp_num_layers",
        Setting("position_embedding_type", ("learned_absolute",)),
        ", whose positions are in the embedding: pass rope, alibi or none",
    ),
    _both(
        "mtp_num_layers",
        "embed_layernorm",
        ": its modules normalize the embedding; remove one of them",
    ),
    _both(
        "hidden_size_per_layer_input",
        Setting("norm_position", other_than("sandwich")),
        " is not supported: pass --norm-position sandwich",
    ),
    *(
        _both("hidden_size_per_layer_input", other, " is not supported: remove one")
        for other in (_BERT, "mtp_num_layers", "mup_base_width")
    ),
    # Precision
    _both(
        "fp8_format",
        Setting("params_dtype", other_than("bf16")),
        ": everything but the 8-bit GEMMs is in bf16; pass --bf16",
    ),
    _both(
        "grad_communication_dtype",
        Setting("params_dtype", ("fp64",)),
        ", which is meant to verify layouts: remove --grad-communication-dtype",
    ),
    # The optimizer and its schedules
    *(
        _both(
            Setting("optimizer", ("muon",)),
            name,
            ": Muon's state is not offloaded; pass --zero-stage 1 to shard it instead, or --optimizer adam",
        )
        for name in ("optimizer_cpu_offload", "optimizer_nvme_offload")
    ),
    _both(
        "optimizer_cpu_offload",
        "optimizer_nvme_offload",
        ", which offloads the same state: pass only one of them",
    ),
    _both(
        "async_save",
        "optimizer_nvme_offload",
        ", which keeps the optimizer state out of host memory, where --async-save copies it: remove "
        "--async-save, or pass --optimizer-cpu-offload instead",
    ),
    _both(
        "decoupled_min_lr",
        Setting("decoupled_lr", (None,)),
        ": pass the peak rate too, or remove --decoupled-min-lr",
    ),
    *(
        conflict
        for name in ("start_weight_decay", "end_weight_decay")
        for conflict in (
            _both(
                Setting(name, other_than(None)),
                Setting("weight_decay_incr_style", ("constant",)),
                ": pass --weight-decay, or --weight-decay-incr-style linear or cosine",
            ),
            _both(
                Setting("weight_decay_incr_style", other_than("constant")),
                Setting(name, (None,)),
                ": pass it too",
            ),
        )
    ),
    _both(
        Setting("lr_step_timing", ("deepspeed",)),
        "train_samples",
        ": it counts updates, pass --train-iters",
    ),
    _both(
        Setting("lr_step_timing", ("deepspeed",)),
        Setting("lr_decay_style", other_than("constant", "linear", "cosine")),
        ": choose one of constant, linear, cosine",
    ),
    _both("train_iters", "train_samples", ", which also sets the length of the run: remove one"),
    _both(
        "step_batch_size_schedule",
        "rampup_batch_size",
        ", which contradicts it: remove one",
    ),
    # Data and checkpoints
    _both(
        "sft",
        Setting("document_packing", ("best_fit",)),
        ": --sft packs conversations by itself; remove --document-packing",
    ),
    _both(
        "override_opt_param_scheduler",
        "use_checkpoint_opt_param_scheduler",
        ": one resumes with the flags' schedule, the other with the checkpoint's; remove one",
    ),
    _both(
        "use_checkpoint_args",
        Setting("load", (None,)),
        ", from which it reads the model: pass it, or remove both",
    ),
    _both(
        "non_persistent_save_interval",
        Setting("non_persistent_local_ckpt_dir", (None,)),
        ": pass a folder on each node's disk or in its memory, for example /dev/shm/megalite",
    ),
    _both(
        "non_persistent_save_interval",
        Setting("save", (None,)),
        ": pass the folder of persistent checkpoints, which the run falls back on",
    ),
    # Profilers
    _both("profile", "profile_execution", ": both start the profiler; remove one"),
    *(
        _both(name, Setting("tensorboard_dir", (None,)), ", where the trace is written: pass it too")
        for name in ("profile_execution", "use_pytorch_profiler")
    ),
)
"""Settings that exclude each other. A setting without effect excludes nothing."""


def conflicts(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Refuse settings that exclude each other."""
    found = [each for each in CONFLICTS if _is_met(each.one, config) and _is_met(each.other, config)]
    unused = without_effect(config_fields(), config.values()) if found else {}
    for one, other, why in found:
        if unused.keys().isdisjoint((one.field, other.field)):
            is_missing = _value(other.field, config) is None
            second = f"without {flag_of(other.field)}" if is_missing else f"with {_shown(other, config)}"
            yield Problem((one.field, other.field), f"{_shown(one, config)} {second}{why}")


def _value(name: str, config: Config) -> Any:
    return getattr(getattr(config, fields_by_name()[name].group), name)


def _is_met(setting: Setting, config: Config) -> bool:
    return setting.is_met(_value(setting.field, config))


def _shown(setting: Setting, config: Config) -> str:
    return flag_with_value(setting.field, _value(setting.field, config))
