"""Find options that are set but have no effect because of other options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from megalite.config.config import Config
from megalite.config.data import CORPUS_FIELDS, DataConfig
from megalite.config.flags import flag_with_value, format_value
from megalite.config.logging import LoggingConfig
from megalite.config.model import ModelConfig
from megalite.config.model_fields import MAMBA_OPTIONS, inactive_options
from megalite.config.optimizer import OptimizerConfig
from megalite.config.rules.parallel_rules import replicas
from megalite.config.stage_layers import SPLITS
from megalite.pipeline.schedules import SCHEDULES

_FOR_ALL_DASHBOARDS = (
    "tensorboard_log_interval",
    "log_timers_to_tensorboard",
    "log_batch_size_to_tensorboard",
    "log_validation_ppl_to_tensorboard",
    "log_memory_to_tensorboard",
    "log_optimizer_states_to_tensorboard",
)
_OF_PYTORCH_PROFILER = (
    "profile_name",
    "pytorch_profiler_collect_shapes",
    "pytorch_profiler_collect_callstack",
    "pytorch_profiler_collect_memory",
)
_DYNAMIC_LOSS_SCALE = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")


def unused_options(config: Config, world_size: int | None = None) -> list[str]:
    """Return a line with the reason for each option that differs from its default but has no effect.

    Args:
        world_size: number of ranks, if it is known; it tells whether there is only one replica.
    """
    defaults = Config().values()
    changed = {name: value for name, value in config.values().items() if value != defaults[name]}
    reasons: dict[str, str] = {}
    for name, why in _reasons(config, world_size):
        reasons.setdefault(name, why)  # the first reason is enough
    return [
        f"{flag_with_value(name, changed[name])} has no effect: {why}"
        for name, why in reasons.items()
        if name in changed
    ]


def _reasons(config: Config, world_size: int | None) -> Iterator[tuple[str, str]]:
    """Yield each option that has no effect in this config, set or not, with the reason."""
    model, optimizer, logging = config.model, config.optimizer, config.logging
    yield from inactive_options(model).items()
    yield from _model_reasons(model)
    if not optimizer.offloads_optimizer:
        yield (
            "optimizer_offload_fraction",
            "neither --optimizer-cpu-offload nor --optimizer-nvme-offload is set",
        )
    if optimizer.optimizer != "muon":
        for field in fields(optimizer):
            if field.name.startswith("muon_"):
                yield field.name, f"--optimizer is {optimizer.optimizer}, not muon"
    yield from _fp8_reasons(config, world_size)
    yield from _schedule_reasons(optimizer)
    yield from loss_reasons(config)
    yield from _length_reasons(config)
    yield from _task_reasons(config)
    yield from _data_reasons(config)
    yield from _checkpoint_reasons(config)
    if config.parallel.tp == config.parallel.pp == replicas(config, world_size) == 1:
        yield "log_straggler_interval", "there is only one rank"
    yield from _timer_reasons(config)
    if logging.tensorboard_dir is None:
        for field in fields(logging):
            if "tensorboard" in field.name and not (
                logging.has_dashboards and field.name in _FOR_ALL_DASHBOARDS
            ):
                yield field.name, "--tensorboard-dir is not set"
    if not model.has_experts:
        yield "log_experts_interval", "there are no experts (--num-experts)"
    elif not (logging.has_dashboards or logging.metrics_path(config.checkpoint.save)):
        yield "log_experts_interval", "there is no metrics file, and --tensorboard-dir is not set"
    if logging.record_routing is None:
        yield "record_routing_iterations", "--record-routing is not set"
    if not config.dry_run.dry_run:
        for name in ("world_size", "rank", "dry_run_json"):
            yield name, "--dry-run is not set"
    else:
        yield "compile", "a dry run computes nothing"
        yield "gemm_epilogues", "a dry run computes nothing"
    if model.params_dtype not in ("bf16", "fp16"):
        yield "gemm_epilogues", f"only GEMMs in bf16 and fp16 have epilogues, not in {model.params_dtype}"
    if model.activation != "gelu" and not model.has_mlp_bias:
        yield "gemm_epilogues", f"the activation is {model.activation}, and no linear layer has a bias"
    yield from _recompute_reasons(config)
    yield from _parallel_reasons(config, world_size)


def _parallel_reasons(config: Config, world_size: int | None) -> Iterator[tuple[str, str]]:
    """Yield each option of the layout that has no effect in this config, with the reason."""
    if config.parallel.cp == 1:
        for name in ("cp_comm_type", "dynamic_context_parallel"):
            yield name, "there is one context-parallel rank (--cp 1)"
    if not config.parallel.has_cp_levels:
        comm_types = format_value(config.parallel.cp_comm_type)
        reason = f"--cp-comm-type is {comm_types}, without a2a+p2p" if config.parallel.cp > 1 else "--cp is 1"
        yield "hierarchical_context_parallel_sizes", reason
    if config.parallel.ep == 1:
        yield "moe_imbalance", "there is one expert-parallel rank (--ep 1)"
    if not (config.model.has_experts and config.parallel.has_expert_axes):
        yield "moe_token_dispatcher_type", "no experts are on axes of their own (--ep, --etp)"
    if config.parallel.tp == 1:
        yield "sequence_parallel", "there is one tensor-parallel rank (--tp 1)"
    yield from _tp_overlap_reasons(config)
    if config.parallel.distributed_backend == "gloo":
        yield "ranks_share_gpus", "ranks run on CPU cores (--distributed-backend gloo)"
    if config.parallel.distributed_backend == "nccl":
        yield "distributed_backend", "ranks on GPUs use nccl anyway, and ranks on CPUs can only use gloo"
    yield from _replica_reasons(config, world_size)
    if config.parallel.pp == 1:
        yield "pipeline_schedule", "there is one pipeline stage (--pp 1)"
        for name in SPLITS:
            yield name, "there is one pipeline stage (--pp 1)"


def _model_reasons(model: ModelConfig) -> Iterator[tuple[str, str]]:
    if model.window_size is None:
        for name in ("window_rotary_base", "window_rope_scaling"):
            yield name, "no layer has a window (--window-size)"
    if model.moe_router_score_function != "softmax":
        yield "moe_router_pre_softmax", f"--moe-router-score-function is {model.moe_router_score_function}"
    if model.moe_expert_capacity_factor is None:
        yield "moe_token_drop_policy", "experts drop no tokens: --moe-expert-capacity-factor is not set"
    if model.add_bias_linear:
        yield "mamba_bias", "every linear layer has a bias, without --disable-bias-linear"
    if model.multi_latent_attention:
        yield "kv_channels", "--qk-head-dim, --qk-pos-emb-head-dim and --v-head-dim set the sizes of heads"
    if model.mtp_num_layers == 0:
        yield "mtp_loss_scaling_factor", "--mtp-num-layers is 0"
    if model.mup_base_width is None:
        yield "mup_base_head_dim", "--mup-base-width is not set"
    if model.parallel_shared_norm and model.norm_position != "pre":
        yield "parallel_shared_norm", f"--norm-position is {model.norm_position}, not pre"
    if model.architecture == "bert":
        yield "add_output_bias", "the head of a BERT has a bias"
    if model.hybrid_override_pattern is not None and not model.has_mamba:
        for name in MAMBA_OPTIONS:
            yield name, "no layer has Mamba-2 (M in --hybrid-override-pattern)"
    if model.architecture != "bert":
        for name in ("bert_binary_head", "mask_prob", "short_seq_prob"):
            yield name, "it is an option of BERT (pretrain_bert.py)"
    if model.pad_vocab_size_to is not None:
        yield "make_vocab_size_divisible_by", "--pad-vocab-size-to sets the padded size"


def _length_reasons(config: Config) -> Iterator[tuple[str, str]]:
    logging = config.logging
    if (last := config.training.train_iters) is not None and not config.training.skips_any(last):
        yield "iterations_to_skip", f"the run ends at --train-iters {last}"
    if last is not None and (logging.profile_modules or 0) > last:
        yield "profile_modules", f"the run ends at --train-iters {last}"
    if last is not None and (config.training.audit_interval or 0) > last:
        yield "audit_interval", f"the run ends at --train-iters {last}"


def _task_reasons(config: Config) -> Iterator[tuple[str, str]]:
    if config.training.eval_tasks is None:
        for field in fields(config.training):
            if field.name.startswith("eval_tasks_"):
                yield field.name, "--eval-tasks is not set"
    elif config.dry_run.dry_run:
        yield "eval_tasks", "a dry run computes nothing"


def _fp8_reasons(config: Config, world_size: int | None) -> Iterator[tuple[str, str]]:
    if config.training.fp8_format is None:
        yield "fp8_weight_cache", "GEMMs are not in FP8 (--fp8)"
    elif config.parallel.zero_stage == 3 and replicas(config, world_size) != 1:
        yield "fp8_weight_cache", "with --zero-stage 3 full weights are not kept"
    elif (
        config.training.compile
        and config.parallel.tp == 1
        and not SCHEDULES[config.parallel.schedule].splits_backward
    ):
        yield "fp8_weight_cache", "compiled layers round weights for each microbatch (--compile)"


def _tp_overlap_reasons(config: Config) -> Iterator[tuple[str, str]]:
    parallel, names = config.parallel, ("tp_comm_overlap", "tp_comm_overlap_method", "tp_comm_overlap_chunks")
    if parallel.tp == 1:
        for name in names:
            yield name, "there is one tensor-parallel rank (--tp 1)"
    if config.training.fp8_format is not None:
        for name in names:
            yield name, "with --fp8-format an operand of a GEMM is scaled by all of its tokens, not by parts"
    if parallel.tp_comm_overlap is False:
        for name in names[1:]:
            yield name, "--no-tp-comm-overlap is set"
    if not parallel.sequence_parallel:
        yield "tp_comm_overlap_method", "torch's operators need --sequence-parallel"


def _replica_reasons(config: Config, world_size: int | None) -> Iterator[tuple[str, str]]:
    parallel = config.parallel
    if parallel.zero_stage < 3:
        yield "fsdp_reshard_after_forward", "only --zero-stage 3 shards weights"
    if parallel.zero_stage == 0:
        yield "overlap_param_gather", "with --zero-stage 0 weights are not gathered"
        yield "num_distributed_optimizer_instances", "with --zero-stage 0 nothing is sharded"
    elif parallel.zero_stage == 3:
        yield "overlap_param_gather", "with --zero-stage 3 each layer gathers its own weights"
        for name in ("overlap_grad_reduce", "ddp_bucket_size"):
            yield name, "with --zero-stage 3 each layer reduces its gradients during backward"
    num_replicas = replicas(config, world_size)
    if num_replicas == 1:
        for name in (
            "zero_stage",
            "data_parallel_shard_degree",
            "num_distributed_optimizer_instances",
            "fsdp_reshard_after_forward",
            "overlap_grad_reduce",
            "overlap_param_gather",
            "grad_communication_dtype",
            "ddp_bucket_size",
        ):
            yield name, "there is one replica (--dp 1)"
    elif num_replicas is not None:
        one_node = num_replicas * parallel.tp
        if parallel.shard_degree_among(num_replicas, one_node) == 1:
            reason = "each group of replicas that it shards over has one rank"
            yield "zero_stage", f"{reason}: pass a larger --data-parallel-shard-degree"


def loss_reasons(config: Config) -> Iterator[tuple[str, str]]:
    """Yield settings of the loss scale and the spiky-loss check that have no effect, with reasons."""
    dtype, loss_scale = config.model.params_dtype, config.optimizer.loss_scale
    if not config.training.manual_gc:
        for name in ("manual_gc_interval", "manual_gc_eval"):
            yield name, "Python collects garbage by itself (--no-manual-gc)"
    if not config.training.check_for_spiky_loss:
        yield "spiky_loss_factor", "--check-for-spiky-loss is off"
    if dtype != "fp16":
        for name in ("loss_scale", *_DYNAMIC_LOSS_SCALE):
            yield name, f"{dtype} has no loss scale, only fp16 has one"
    elif loss_scale is not None:
        for name in _DYNAMIC_LOSS_SCALE:
            yield name, f"--loss-scale {loss_scale} is constant"


def fill_in_middle_reasons(data: DataConfig) -> Iterator[tuple[str, str]]:
    """Yield settings of fill-in-the-middle that have no effect, with reasons."""
    if data.fim_rate == 0 or data.mock_data:
        reason = "--fim-rate is 0" if data.fim_rate == 0 else "--mock-data reads no corpus"
        for name in ("fim_spm_rate", "fim_prefix_token", "fim_middle_token", "fim_suffix_token"):
            yield name, reason


def _timer_reasons(config: Config) -> Iterator[tuple[str, str]]:
    logging = config.logging
    if not logging.timing_log_level:
        yield "timing_log_option", "no timers are logged: pass --timing-log-level 1 or 2"
    if logging.trace_pipeline is None:
        yield "trace_pipeline_path", "--trace-pipeline is not set"
    last, traced = config.training.train_iters, logging.traced_iterations
    if last is not None and traced and last < traced[0]:
        yield "trace_pipeline", f"the run ends at --train-iters {last}"
    if last is not None and last < logging.log_interval:
        yield (
            "log_time_breakdown",
            f"the run ends at --train-iters {last}, before the first --log-interval {logging.log_interval}",
        )
    yield from _profiler_reasons(logging)
    if logging.wandb_project is None:
        for name in ("wandb_exp_name", "wandb_save_dir"):
            yield name, "--wandb-project is not set"


def _profiler_reasons(logging: LoggingConfig) -> Iterator[tuple[str, str]]:
    if not (logging.profile_execution or (logging.profile and logging.use_pytorch_profiler)):
        for name in _OF_PYTORCH_PROFILER:
            yield name, "PyTorch's profiler is off: pass --profile --use-pytorch-profiler"
    if not (logging.profile_execution or logging.profile):
        yield "profile_repeat", "--profile is off"
    if not logging.profile:
        for name in ("profile_step_start", "profile_step_end", "use_pytorch_profiler"):
            yield name, "--profile is off"
        if not logging.record_memory_history:
            yield "profile_ranks", "--profile is off"
    if logging.profile_modules is None:
        for name in ("profile_modules_depth", "profile_modules_top", "profile_modules_file"):
            yield name, "--profile-modules is not set"
    if not logging.record_memory_history:
        yield "memory_snapshot_path", "--record-memory-history is off"


def _schedule_reasons(optimizer: OptimizerConfig) -> Iterator[tuple[str, str]]:
    if not (optimizer.lr_warmup_iters or optimizer.lr_warmup_samples or optimizer.lr_warmup_fraction):
        for name in ("lr_warmup_init", "lr_warmup_style"):
            yield name, "there is no warm-up"
    if optimizer.lr_decay_style != "WSD":
        for name in ("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples"):
            yield name, f"--lr-decay-style is {optimizer.lr_decay_style}, not WSD"
    if optimizer.lr_decay_style == "constant":
        for name in ("min_lr", "decoupled_min_lr"):
            yield name, "--lr-decay-style is constant"
    if optimizer.weight_decay_incr_style != "constant":
        yield "weight_decay", "--start-weight-decay and --end-weight-decay replace it"
    else:
        for name in ("weight_decay_incr_iters", "weight_decay_incr_samples"):
            yield name, "--weight-decay-incr-style is constant"


def _checkpoint_reasons(config: Config) -> Iterator[tuple[str, str]]:
    checkpoint = config.checkpoint
    schedules = ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler")
    allowed = ("allow_data_change", "allow_settings_change")
    if checkpoint.save is None:
        for name in (
            "save_interval",
            "save_interval_minutes",
            "keep_last",
            "keep_every",
            "async_save",
            "exit_on_save_failure",
            "save_optim",
        ):
            yield name, "--save is not set"
    elif not checkpoint.saves_at_intervals and checkpoint.non_persistent_save_interval is None:
        yield "async_save", "the run saves only at its end: pass --save-interval"
    if checkpoint.non_persistent_save_interval is None:
        for name in ("non_persistent_ckpt_type", "non_persistent_local_ckpt_dir"):
            yield name, "--non-persistent-save-interval is not set"
    if checkpoint.load is None:
        for name in ("load_iteration", "finetune", "load_optim", *allowed, *schedules):
            yield name, "--load is not set"
    elif checkpoint.finetune:
        for name in ("load_optim", *allowed, *schedules):
            yield name, "--finetune loads only the weights"
    elif not checkpoint.load_optim:
        for name in schedules:
            yield name, "with --no-load-optim the flags' schedule is used"
        yield "allow_settings_change", "with --no-load-optim the flags' settings are used"


def _data_reasons(config: Config) -> Iterator[tuple[str, str]]:
    data, positions = config.data, config.model.position_embedding_type
    if positions in ("alibi", "none"):
        yield "reset_position_ids", f"--position-embedding-type is {positions}"
    if data.mock_data:
        others = ("aml_data_download_path", "split", "blend_by", "data_cache_path", "fim_rate")
        for name in (*CORPUS_FIELDS, *others):
            yield name, "--mock-data does not read a corpus"
    elif any(getattr(data, name) for name in CORPUS_FIELDS if name not in ("data_path", "data_args_path")):
        yield "split", "each split has its own data"
    if not data.sft:
        for name in ("sft_packing", "sft_long_conversations"):
            yield name, "--sft is not set"
    elif data.mock_data:
        yield "sft_long_conversations", "--mock-data does not read a corpus"
    yield from fill_in_middle_reasons(data)


def _recompute_reasons(config: Config) -> Iterator[tuple[str, str]]:
    granularity = config.recompute.recompute_granularity
    current = "is not set" if granularity is None else f"is {granularity}"
    if granularity != "full":
        for name in ("recompute_method", "recompute_num_layers", "distribute_saved_activations"):
            yield name, f"--recompute-granularity {current}, not full"
    elif config.parallel.tp == 1:
        yield "distribute_saved_activations", "there is one tensor-parallel rank (--tp 1)"
    elif config.parallel.sequence_parallel:
        yield "distribute_saved_activations", "--sequence-parallel already shards what is saved"
    if granularity != "selective":
        yield "recompute_modules", f"--recompute-granularity {current}, not selective"
