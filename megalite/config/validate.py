"""Validate a config: report all its errors at once, and the options that are set but have no effect."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

from megalite.config.config import LAYOUT_OPTIONS, Config
from megalite.config.data import CORPUS_FIELDS
from megalite.config.fields import (
    MAX_INT,
    ConfigField,
    FieldValues,
    config_fields,
    declared_conflicts,
    fields_by_name,
    without_effect,
)
from megalite.config.option import flag_of, flag_with_value
from megalite.config.rules import attention_rules, model_rules, parallel_rules, training_rules
from megalite.config.rules.parallel_rules import replicas
from megalite.pipeline.schedules import SCHEDULES
from megalite.utils.errors import ConfigError, Problem, one_line, shortened

Rule = Callable[[Config, int | None], Iterator[Problem]]
"""A function that yields a config's problems. Its second argument is the number of ranks, or None."""

_MODULES = (
    attention_rules,
    model_rules,
    parallel_rules,
    training_rules,
    training_rules,
)
_SPLIT = ("data_path", "data_args_path", "data_phases")
"""Fields of corpora that --split divides."""


def conflicts(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Yield a problem for each pair of fields that a group of options declares as a conflict."""
    values = FieldValues(config)
    found = [each for each in declared_conflicts() if each.is_met_in(values)]
    named = [fields_by_name()[name] for conflict in found for name in conflict.fields]
    unused = without_effect(named, values)
    for conflict in found:
        if unused.keys().isdisjoint(conflict.fields):
            yield Problem(conflict.fields, conflict.text(values))


_OF_A_RULE = {"config": "Config", "world_size": "int | None", "return": "Iterator[Problem]"}
"""Parameters and result of a rule."""
RULES: tuple[Rule, ...] = (
    conflicts,
    *dict.fromkeys(
        each
        for module in _MODULES
        for each in vars(module).values()
        if getattr(each, "__annotations__", None) == _OF_A_RULE
    ),
)
"""Every rule between fields, in the order of their messages: each function of these modules that is one."""


def check_config(config: Config, world_size: int | None = None) -> None:
    """Check every field and every rule between fields.

    Args:
        world_size: number of ranks; None skips the rules that need it.

    Raises:
        ConfigError: with all problems. Each names the flags, their values and the fix.
    """
    if problems := problems_of(config, world_size):
        raise ConfigError(problems)


def problems_of(config: Config, world_size: int | None, invalid_fields: Collection[str] = ()) -> list[str]:
    """Return all problems of a config, one line each.

    Args:
        world_size: number of ranks; None skips the rules that need it.
        invalid_fields: fields that are already known to be invalid; rules that involve them are skipped.
    """
    problems = [problem for problem in range_problems(config) if problem.fields[0] not in invalid_fields]
    invalid = {*invalid_fields, *(name for problem in problems for name in problem.fields)}
    valid = _with_defaults(config, invalid)
    for rule in RULES:
        problems += [problem for problem in rule(valid, world_size) if not invalid & {*problem.fields}]
    return [one_line(problem.text) for problem in problems]


def range_problems(config: Config) -> Iterator[Problem]:
    """Yield a problem for each field whose value is invalid on its own."""
    for field in config_fields():
        value = getattr(getattr(config, field.group), field.name)
        if value is not None:
            yield from _field_problems(field, value if isinstance(value, tuple) else (value,))


def _field_problems(field: ConfigField, items: Iterable[Any]) -> Iterator[Problem]:
    flag, allowed = flag_of(field.name), field.declared.allowed
    for item in items:
        if isinstance(item, int) and abs(item) > MAX_INT:
            shown = shortened(str(item))
            yield Problem((field.name,), f"{flag} {shown} is out of range: it must be at most 2**63 - 1")
        elif allowed is not None and not allowed.holds(item):
            yield Problem((field.name,), f"{flag} {item} {allowed.fault} {allowed.text}")
        elif field.kind.choices and item not in field.kind.choices:
            choices = ", ".join(field.kind.choices)
            yield Problem((field.name,), f"{flag} {item} is not known: choose one of {choices}")


def problems_in_any_layout(config: Config) -> list[str]:
    """Return the problems that do not depend on options of the layout, and values that no layout can have."""
    ranges = [one_line(problem.text) for problem in range_problems(config)]
    others = problems_of(config, None, LAYOUT_OPTIONS)
    return list(dict.fromkeys([*ranges, *others]))


def _with_defaults(config: Config, names: Collection[str]) -> Config:
    """Return the config with these fields at their defaults, since a rule may divide by an invalid 0."""
    parts = {}
    for group in fields(config):
        part = getattr(config, group.name)
        defaults = {field.name: field.default for field in fields(part) if field.name in names}
        parts[group.name] = replace(part, **defaults)
    return replace(config, **parts)


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
    model, data = config.model, config.data
    yield from without_effect(config_fields(), config.values()).items()
    if any(getattr(data, name) for name in CORPUS_FIELDS if name not in _SPLIT):
        yield "split", "each split has its own data"
    if model.activation != "gelu" and not model.has_mlp_bias:
        yield "gemm_epilogues", f"the activation is {model.activation}, and no linear layer has a bias"
    yield from _parallel_reasons(config, world_size)
    yield from _logging_reasons(config, world_size)


def _parallel_reasons(config: Config, world_size: int | None) -> Iterator[tuple[str, str]]:
    """Yield each option of the layout that has no effect in this config, with the reason."""
    parallel = config.parallel
    if not (config.model.has_experts and parallel.has_expert_axes):
        yield "moe_token_dispatcher_type", "no experts are on axes of their own (--ep, --etp)"
    if parallel.distributed_backend == "nccl":
        yield "distributed_backend", "ranks on GPUs use nccl anyway, and ranks on CPUs can only use gloo"
    if parallel.zero_stage == 3 and replicas(config, world_size) != 1:
        yield "fp8_weight_cache", "with --zero-stage 3 full weights are not kept"
    elif config.training.compile and parallel.tp == 1 and not SCHEDULES[parallel.schedule].splits_backward:
        yield "fp8_weight_cache", "compiled layers round weights for each microbatch (--compile)"
    if parallel.zero_stage == 0:
        yield "fp8_param_gather", "only --zero-stage 1 to 3 gather weights"
    elif parallel.zero_stage < 3 and config.optimizer.offloads_optimizer:
        yield "fp8_param_gather", "only --zero-stage 3 gathers weights in 8 bits from offloaded state"
    num_replicas = replicas(config, world_size)
    if num_replicas == 1:
        for name in (
            "zero_stage",
            "fp8_param_gather",
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
    if not (logging.has_dashboards or logging.metrics_path(config.checkpoint.run_folder)):
        yield "log_experts_interval", "there is no metrics file, and --tensorboard-dir is not set"
    if config.parallel.tp == config.parallel.pp == replicas(config, world_size) == 1:
        yield "log_straggler_interval", "there is only one rank"
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
