"""The range of values of each numeric field."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from megalite.config.config import Config
from megalite.config.fields import MAX_INT, ConfigField, config_fields
from megalite.config.flags import flag_of
from megalite.config.model_fields import MODEL_OPTIONS
from megalite.config.option import (
    ABOVE_ONE,
    AT_LEAST_ONE,
    AT_LEAST_TWO,
    FRACTION,
    NONZERO_SHARE,
    NOT_NEGATIVE,
    OPEN_SHARE,
    POSITIVE,
    SEED,
    SHARE,
    SIZE,
    TIMERS,
    ZERO_STAGE,
)
from megalite.distributed.axes import AXES, EXPERTS
from megalite.errors import Problem, shortened

_FIELDS_OF_RANGE = {
    SIZE: f"""
        {" ".join({axis.field for each in (*AXES, EXPERTS) for axis in each.axes})}
        world_size num_distributed_optimizer_instances muon_num_ns_steps
        num_virtual_stages_per_pipeline_rank num_layers_per_virtual_pipeline_stage pipeline_layers
        hierarchical_context_parallel_sizes
        decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
        distributed_timeout_minutes num_threads micro_batch_size global_batch_size
        recompute_num_layers cross_entropy_chunks mlp_chunks keep_last profile_modules_top
        tensorboard_queue_size""",
    POSITIVE: """
        ddp_bucket_size lr_decay_iters lr_wsd_decay_iters
        train_iters train_samples rampup_batch_size
        lr_decay_samples lr_wsd_decay_samples weight_decay_incr_iters weight_decay_incr_samples
        eval_interval eval_tasks_interval eval_tasks_limit exit_interval exit_duration_in_mins audit_interval
        save_interval save_interval_minutes non_persistent_save_interval keep_every profile_modules
        log_interval log_straggler_interval log_layer_grad_norms_interval
        tensorboard_log_interval profile_step_end profile_repeat adam_eps
        loss_scale initial_loss_scale min_loss_scale muon_extra_scale_factor
        loss_scale_window hysteresis""",
    NOT_NEGATIVE: """
        data_parallel_shard_degree
        lr min_lr decoupled_lr decoupled_min_lr
        lr_warmup_iters lr_warmup_samples lr_warmup_init weight_decay
        start_weight_decay end_weight_decay clip_grad eval_iters hang_timeout load_iteration
        manual_gc_interval eval_tasks_num_fewshot log_experts_interval
        profile_step_start profile_ranks profile_modules_depth rank cpu_offload_activations""",
    FRACTION: "lr_warmup_fraction adam_beta1 adam_beta2 muon_momentum",
    AT_LEAST_ONE: "moe_imbalance",
    AT_LEAST_TWO: "tp_comm_overlap_chunks",
    ABOVE_ONE: "spiky_loss_factor",
    ZERO_STAGE: "zero_stage",
    TIMERS: "timing_log_level",
    NONZERO_SHARE: "optimizer_offload_fraction",
    OPEN_SHARE: "ema_decay",
    SHARE: "fim_rate fim_spm_rate short_seq_prob",
    SEED: "seed",
}
RANGES = {name: declared.allowed for name, declared in MODEL_OPTIONS.items() if declared.allowed} | {
    name: allowed for allowed, names in _FIELDS_OF_RANGE.items() for name in names.split()
}
"""The range of every numeric field. For a tuple, it applies to each element."""


def range_problems(config: Config) -> Iterator[Problem]:
    """Yield a problem for each field whose value is invalid on its own."""
    for field in config_fields():
        value = getattr(getattr(config, field.group), field.name)
        if value is not None:
            yield from _field_problems(field, value if isinstance(value, tuple) else (value,))


def _field_problems(field: ConfigField, items: Iterable[Any]) -> Iterator[Problem]:
    flag, allowed = flag_of(field.name), RANGES.get(field.name)
    for item in items:
        if isinstance(item, int) and abs(item) > MAX_INT:
            shown = shortened(str(item))
            yield Problem((field.name,), f"{flag} {shown} is out of range: it must be at most 2**63 - 1")
        elif allowed is not None and not allowed.holds(item):
            yield Problem((field.name,), f"{flag} {item} is out of range: it must be {allowed.text}")
        elif field.kind.choices and item not in field.kind.choices:
            choices = ", ".join(field.kind.choices)
            yield Problem((field.name,), f"{flag} {item} is not known: choose one of {choices}")
