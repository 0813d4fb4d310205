"""Options that were set and that something else keeps from having an effect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from megalite.config.config import Config
from megalite.config.data import CORPUS_FIELDS
from megalite.config.flags import flag_of
from megalite.config.logging import LoggingConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.config.rules.layout import replicas
from megalite.config.stages import SPLITS

_FOR_WANDB_TOO = (
    "tensorboard_log_interval",
    "log_timers_to_tensorboard",
    "log_batch_size_to_tensorboard",
    "log_validation_ppl_to_tensorboard",
    "log_memory_to_tensorboard",
)
_DYNAMIC_LOSS_SCALE = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")


def idle_options(config: Config, world_size: int | None = None) -> list[str]:
    """A line for each option that differs from its default and does nothing, with the reason.

    Args:
        world_size: ranks that were started, where it is known: they may be one replica.
    """
    parts = [getattr(config, group.name) for group in fields(config)]
    changed = {
        field.name: value
        for part in parts
        for field in fields(part)
        if (value := getattr(part, field.name)) != field.default
    }
    reasons: dict[str, str] = {}
    for name, why in _reasons(config, world_size):
        reasons.setdefault(name, why)  # one is enough
    return [
        f"{_as_given(name, changed[name])} is without effect: {why}"
        for name, why in reasons.items()
        if name in changed
    ]


def _as_given(name: str, value: object) -> str:
    """A field and its value as they are written on a command line."""
    if value is False:
        return f"--no-{flag_of(name)[2:]}"
    return f"{flag_of(name)} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"


def _reasons(config: Config, world_size: int | None) -> Iterator[tuple[str, str]]:
    """Names that have no effect in this config, each with its reason."""
    model, optimizer, logging = config.model, config.optimizer, config.logging
    if model.position_embedding_type != "learned_absolute":
        yield "max_position_embeddings", f"{model.position_embedding_type} positions need no table"
    if model.position_embedding_type != "rope":
        yield "rotary_base", f"positions are {model.position_embedding_type}, not rope"
    if model.pad_vocab_size_to is not None:
        yield "make_vocab_size_divisible_by", "--pad-vocab-size-to gives the padded size itself"
    yield from _schedule_reasons(optimizer)
    if not config.training.check_for_spiky_loss:
        yield "spiky_loss_factor", "--check-for-spiky-loss is off"
    if (last := config.training.train_iters) is not None and not config.training.skips_any(last):
        yield "iterations_to_skip", f"the run ends with --train-iters {last} before them"
    if last is not None and (logging.profile_modules or 0) > last:
        yield "profile_modules", f"the run ends with --train-iters {last} before it"
    yield from _data_reasons(config)
    yield from _checkpoint_reasons(config)
    if config.parallel.tp == config.parallel.pp == replicas(config, world_size) == 1:
        yield "log_straggler_interval", "one rank has no others to be compared with"
    yield from _timer_reasons(config)
    if logging.tensorboard_dir is None:
        for field in fields(logging):
            if "tensorboard" in field.name and not (logging.wandb_project and field.name in _FOR_WANDB_TOO):
                yield field.name, "there is no --tensorboard-dir"
    if not config.dry_run.dry_run:
        for name in ("world_size", "rank", "dry_run_json"):
            yield name, "it is of --dry-run, which is not given"
    else:
        yield "compile", "a dry run computes nothing"
    yield from _recompute_reasons(config)
    if config.parallel.tp == 1:
        yield "sequence_parallel", "with one tensor-parallel rank (--tp 1) there is nothing to cut"
    if config.parallel.distributed_backend == "nccl":
        yield "distributed_backend", "ranks on GPUs talk through nccl, and ranks without one through gloo"
    if model.params_dtype != "fp16":
        for name in ("loss_scale", *_DYNAMIC_LOSS_SCALE):
            yield name, f"{model.params_dtype} needs no loss scale"
    elif optimizer.loss_scale is not None:
        for name in _DYNAMIC_LOSS_SCALE:
            yield name, f"--loss-scale {optimizer.loss_scale} is constant"
    if config.parallel.zero_stage == 0:
        yield "overlap_param_gather", "with --zero-stage 0 no weights are gathered"
    elif config.parallel.zero_stage == 3:
        yield "overlap_param_gather", "with --zero-stage 3 each layer gathers its weights for itself"
        for name in ("overlap_grad_reduce", "ddp_bucket_size"):
            yield name, "with --zero-stage 3 each layer's gradients leave as backward does"
    if replicas(config, world_size) == 1:
        for name in (
            "zero_stage",
            "overlap_grad_reduce",
            "overlap_param_gather",
            "grad_communication_dtype",
            "ddp_bucket_size",
        ):
            yield name, "there is one replica (--dp 1)"
    if config.parallel.pp == 1:
        yield "pipeline_schedule", "with one pipeline stage (--pp 1) there is nothing to order"
        for name in SPLITS:
            yield name, "one pipeline stage (--pp 1) holds every layer"


def _timer_reasons(config: Config) -> Iterator[tuple[str, str]]:
    """The same for timers, traces and wandb."""
    logging = config.logging
    if not logging.timing_log_level:
        yield "timing_log_option", "no timers are logged: give --timing-log-level 1 or 2"
    if logging.trace_pipeline is None:
        yield "trace_pipeline_path", "there is no --trace-pipeline"
    last, traced = config.training.train_iters, logging.traced_iterations
    if last is not None and traced and last < traced[0]:
        yield "trace_pipeline", f"the run ends with --train-iters {last} before it"
    yield from _profiler_reasons(logging)
    if logging.wandb_project is None:
        for name in ("wandb_exp_name", "wandb_save_dir"):
            yield name, "there is no --wandb-project"


def _profiler_reasons(logging: LoggingConfig) -> Iterator[tuple[str, str]]:
    """The same for profilers."""
    writes = logging.profile_execution or (logging.profile and logging.use_pytorch_profiler)
    if not writes:
        yield "profile_name", "--profile-execution is off"
    if not logging.profile:
        for name in ("profile_step_start", "profile_step_end", "use_pytorch_profiler"):
            yield name, "--profile is off"
        if not logging.record_memory_history:
            yield "profile_ranks", "--profile is off"
    if not logging.record_memory_history:
        yield "memory_snapshot_path", "--record-memory-history is off"


def _schedule_reasons(optimizer: OptimizerConfig) -> Iterator[tuple[str, str]]:
    """The same for the courses of learning rate and weight decay."""
    if optimizer.lr_decay_style != "WSD":
        for name in ("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples"):
            yield name, f"the decay is {optimizer.lr_decay_style}, not WSD"
    if optimizer.lr_decay_style == "constant":
        yield "min_lr", "a constant learning rate never comes down to it"
    if optimizer.weight_decay_incr_style != "constant":
        yield "weight_decay", f"it goes from --start-weight-decay {optimizer.start_weight_decay} to the end's"
    else:
        for name in ("weight_decay_incr_iters", "weight_decay_incr_samples"):
            yield name, "the weight decay is constant"


def _checkpoint_reasons(config: Config) -> Iterator[tuple[str, str]]:
    """The same for what is saved and loaded."""
    checkpoint = config.checkpoint
    schedules = ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler")
    allowed = ("allow_data_change", "allow_settings_change")
    if checkpoint.save is None:
        for name in (
            "save_interval",
            "keep_last",
            "keep_every",
            "async_save",
            "exit_on_save_failure",
            "save_optim",
        ):
            yield name, "there is no --save folder"
    elif checkpoint.save_interval is None and checkpoint.non_persistent_save_interval is None:
        yield "async_save", "only the end is saved, and nothing is trained after it: give --save-interval"
    if checkpoint.non_persistent_save_interval is None:
        for name in ("non_persistent_ckpt_type", "non_persistent_local_ckpt_dir"):
            yield name, "there is no --non-persistent-save-interval"
    if checkpoint.load is None:
        for name in ("load_iteration", "finetune", "load_optim", *allowed, *schedules):
            yield name, "there is no --load folder"
    elif checkpoint.finetune:
        for name in ("load_optim", *allowed, *schedules):
            yield name, "--finetune takes the weights alone"
    elif not checkpoint.load_optim:
        for name in schedules:
            yield name, "with --no-load-optim the given schedule counts"
        yield "allow_settings_change", "with --no-load-optim the given settings count"


def _data_reasons(config: Config) -> Iterator[tuple[str, str]]:
    """The same for what is only of one kind of data."""
    data, positions = config.data, config.model.position_embedding_type
    if positions in ("alibi", "none"):
        yield "reset_position_ids", f"{positions} positions do not count from the start"
    if data.mock_data:
        for name in (*CORPUS_FIELDS, "split", "blend_by", "data_cache_path", "fim_rate"):
            yield name, "--mock-data reads no corpus"
    elif any(getattr(data, name) for name in CORPUS_FIELDS if name not in ("data_path", "data_args_path")):
        yield "split", "each split's data is given apart"
    if data.fim_rate == 0:
        for name in ("fim_spm_rate", "fim_prefix_token", "fim_middle_token", "fim_suffix_token"):
            yield name, "--fim-rate is 0"


def _recompute_reasons(config: Config) -> Iterator[tuple[str, str]]:
    """The same for what is only of one way to recompute."""
    granularity = config.recompute.recompute_granularity
    given = "is not given" if granularity is None else f"is {granularity}"
    if granularity != "full":
        for name in ("recompute_method", "recompute_num_layers", "distribute_saved_activations"):
            yield name, f"--recompute-granularity {given}, not full"
    elif config.parallel.tp == 1:
        yield "distribute_saved_activations", "there is one tensor-parallel rank (--tp 1)"
    elif config.parallel.sequence_parallel:
        yield "distribute_saved_activations", "--sequence-parallel has cut what is saved already"
    if granularity != "selective":
        yield "recompute_modules", f"--recompute-granularity {given}, not selective"
