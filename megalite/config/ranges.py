"""The range of values of each numeric field."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from megalite.config.config import Config
from megalite.config.flags import flag_of
from megalite.errors import Problem


class Range(NamedTuple):
    """Hold the values that a field may have, and their description."""

    holds: Callable[[float], bool]
    text: str


POSITIVE = Range(lambda value: 0 < value < math.inf, "greater than 0")
NOT_NEGATIVE = Range(lambda value: 0 <= value < math.inf, "at least 0")
NONZERO_SHARE = Range(lambda value: 0 < value <= 1, "greater than 0 and at most 1")
FRACTION = Range(lambda value: 0 <= value < 1, "at least 0 and below 1")
OPEN_SHARE = Range(lambda value: 0 < value < 1, "greater than 0 and below 1")
SHARE = Range(lambda value: 0 <= value <= 1, "from 0 to 1")
ABOVE_ONE = Range(lambda value: 1 < value < math.inf, "greater than 1")
TIMERS = Range(lambda value: value in (0, 1, 2), "0, 1 or 2")
ZERO_STAGE = Range(lambda value: value in (0, 1, 2, 3), "0, 1, 2 or 3")
SEED = Range(lambda value: 0 <= value < 2**32, "at least 0 and below 2**32")

_FIELDS_OF_RANGE = {
    POSITIVE: """
        num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels seq_length
        max_position_embeddings vocab_size make_vocab_size_divisible_by pad_vocab_size_to rotary_base
        tensor_model_parallel_size pipeline_model_parallel_size data_parallel_size
        num_distributed_optimizer_instances
        num_virtual_stages_per_pipeline_rank num_layers_per_virtual_pipeline_stage pipeline_layers
        decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
        ddp_bucket_size distributed_timeout_minutes num_threads lr_decay_iters lr_wsd_decay_iters
        micro_batch_size global_batch_size train_iters train_samples rampup_batch_size
        lr_decay_samples lr_wsd_decay_samples weight_decay_incr_iters weight_decay_incr_samples
        eval_interval exit_interval
        exit_duration_in_mins recompute_num_layers cross_entropy_chunks
        save_interval save_interval_minutes non_persistent_save_interval
        keep_last keep_every world_size profile_modules profile_modules_top
        log_interval log_straggler_interval log_layer_grad_norms_interval
        tensorboard_log_interval tensorboard_queue_size profile_step_end profile_repeat adam_eps
        loss_scale initial_loss_scale min_loss_scale
        loss_scale_window hysteresis""",
    NOT_NEGATIVE: """
        data_parallel_shard_degree
        norm_epsilon init_method_std lr min_lr decoupled_lr decoupled_min_lr
        lr_warmup_iters lr_warmup_samples lr_warmup_init weight_decay
        start_weight_decay end_weight_decay clip_grad eval_iters hang_timeout load_iteration
        profile_step_start profile_ranks profile_modules_depth rank cpu_offload_activations""",
    FRACTION: "hidden_dropout attention_dropout lr_warmup_fraction adam_beta1 adam_beta2",
    ABOVE_ONE: "spiky_loss_factor",
    ZERO_STAGE: "zero_stage",
    TIMERS: "timing_log_level",
    OPEN_SHARE: "mask_prob",
    NONZERO_SHARE: "optimizer_offload_fraction",
    SHARE: "fim_rate fim_spm_rate short_seq_prob",
    SEED: "seed",
}
RANGES = {name: allowed for allowed, names in _FIELDS_OF_RANGE.items() for name in names.split()}
"""The range of every numeric field; of each element if the field is a tuple."""


def range_problems(config: Config) -> Iterator[Problem]:
    """Yield a problem for each field whose value is invalid on its own."""
    for group in fields(config):
        part = getattr(config, group.name)
        hints = get_type_hints(type(part))
        for field in fields(part):
            yield from _field_problems(field.name, hints[field.name], getattr(part, field.name))


def _field_problems(name: str, hint: Any, value: Any) -> Iterator[Problem]:
    if value is None:
        return
    flag, allowed = flag_of(name), RANGES.get(name)
    if allowed is not None:
        for item in value if isinstance(value, tuple) else (value,):
            if not allowed.holds(item):
                yield Problem((name,), f"{flag} {item} is out of range: it must be {allowed.text}")
    elif get_origin(hint) is Literal and value not in get_args(hint):
        yield Problem((name,), f"{flag} {value} is not known: choose one of {', '.join(get_args(hint))}")
