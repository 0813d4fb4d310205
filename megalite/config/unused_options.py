"""Find options that are set but have no effect because of other options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from megalite.config.config import Config
from megalite.config.data import CORPUS_FIELDS
from megalite.config.fields import config_fields, without_effect
from megalite.config.model_fields import MAMBA_OPTIONS
from megalite.config.option import flag_with_value, format_value
from megalite.config.rules.parallel_rules import replicas
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
    model, optimizer, data, checkpoint = config.model, config.optimizer, config.data, config.checkpoint
    yield from without_effect(config_fields(), config.values()).items()
    if model.hybrid_override_pattern is not None and not model.has_mamba:
        for name in MAMBA_OPTIONS:
            yield name, "no layer has Mamba-2 (M in --hybrid-override-pattern)"
    if not optimizer.offloads_optimizer:
        reason = "neither --optimizer-cpu-offload nor --optimizer-nvme-offload is set"
        yield "optimizer_offload_fraction", reason
    if not (optimizer.lr_warmup_iters or optimizer.lr_warmup_samples or optimizer.lr_warmup_fraction):
        for name in ("lr_warmup_init", "lr_warmup_style"):
            yield name, "there is no warm-up"
    if any(getattr(data, name) for name in CORPUS_FIELDS if name not in ("data_path", "data_args_path")):
        yield "split", "each split has its own data"
    if not checkpoint.saves_at_intervals and checkpoint.non_persistent_save_interval is None:
        yield "async_save", "the run saves only at its end: pass --save-interval"
    if model.params_dtype not in ("bf16", "fp16"):
        yield "gemm_epilogues", f"only GEMMs in bf16 and fp16 have epilogues, not in {model.params_dtype}"
    if model.activation != "gelu" and not model.has_mlp_bias:
        yield "gemm_epilogues", f"the activation is {model.activation}, and no linear layer has a bias"
    yield from _parallel_reasons(config, world_size)
    yield from _logging_reasons(config, world_size)


def _parallel_reasons(config: Config, world_size: int | None) -> Iterator[tuple[str, str]]:
    """Yield each option of the layout that has no effect in this config, with the reason."""
    parallel = config.parallel
    if not parallel.has_cp_levels:
        comm_types = format_value(parallel.cp_comm_type)
        reason = f"--cp-comm-type is {comm_types}, without a2a+p2p" if parallel.cp > 1 else "--cp is 1"
        yield "hierarchical_context_parallel_sizes", reason
    if not (config.model.has_experts and parallel.has_expert_axes):
        yield "moe_token_dispatcher_type", "no experts are on axes of their own (--ep, --etp)"
    if parallel.distributed_backend == "gloo":
        yield "ranks_share_gpus", "ranks run on CPU cores (--distributed-backend gloo)"
    if parallel.distributed_backend == "nccl":
        yield "distributed_backend", "ranks on GPUs use nccl anyway, and ranks on CPUs can only use gloo"
    if parallel.tp == 1:
        yield "distribute_saved_activations", "there is one tensor-parallel rank (--tp 1)"
    elif parallel.sequence_parallel:
        yield "distribute_saved_activations", "--sequence-parallel already shards what is saved"
    if parallel.zero_stage == 3 and replicas(config, world_size) != 1:
        yield "fp8_weight_cache", "with --zero-stage 3 full weights are not kept"
    elif config.training.compile and parallel.tp == 1 and not SCHEDULES[parallel.schedule].splits_backward:
        yield "fp8_weight_cache", "compiled layers round weights for each microbatch (--compile)"
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


def _logging_reasons(config: Config, world_size: int | None) -> Iterator[tuple[str, str]]:
    """Yield each option of logs, traces and profilers that has no effect in this config, with the reason."""
    logging, last = config.logging, config.training.train_iters
    if logging.tensorboard_dir is None:
        for field in fields(logging):
            if "tensorboard" in field.name and not (
                logging.has_dashboards and field.name in _FOR_ALL_DASHBOARDS
            ):
                yield field.name, "--tensorboard-dir is not set"
    if not (logging.has_dashboards or logging.metrics_path(config.checkpoint.save)):
        yield "log_experts_interval", "there is no metrics file, and --tensorboard-dir is not set"
    if config.parallel.tp == config.parallel.pp == replicas(config, world_size) == 1:
        yield "log_straggler_interval", "there is only one rank"
    if not (logging.profile_execution or (logging.profile and logging.use_pytorch_profiler)):
        for name in _OF_PYTORCH_PROFILER:
            yield name, "PyTorch's profiler is off: pass --profile --use-pytorch-profiler"
    if not (logging.profile_execution or logging.profile):
        yield "profile_repeat", "neither --profile nor --profile-execution is set"
    if not (logging.profile or logging.record_memory_history):
        yield "profile_ranks", "neither --profile nor --record-memory-history is set"
    if last is None:
        return
    end = f"the run ends at --train-iters {last}"
    if not config.training.skips_any(last):
        yield "iterations_to_skip", end
    if (logging.profile_modules or 0) > last:
        yield "profile_modules", end
    if (config.training.audit_interval or 0) > last:
        yield "audit_interval", end
    if logging.traced_iterations and last < logging.traced_iterations[0]:
        yield "trace_pipeline", end
    if last < logging.log_interval:
        yield "log_time_breakdown", f"{end}, before the first --log-interval {logging.log_interval}"
