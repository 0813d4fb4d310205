"""Validate a config, and report all its errors at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

from megalite.config.config import Config
from megalite.config.fields import MAX_INT, ConfigField, config_fields
from megalite.config.layout_options import LAYOUT_OPTIONS
from megalite.config.option import flag_of
from megalite.config.rules import (
    attention_rules,
    data_rules,
    expert_rules,
    logging_rules,
    model_rules,
    parallel_rules,
    recurrent_rules,
    training_rules,
)
from megalite.config.rules.conflicts import conflicts
from megalite.config.rules.sizes import bounds
from megalite.utils.errors import ConfigError, Problem, one_line, shortened

Rule = Callable[[Config, int | None], Iterator[Problem]]
"""A function that yields a config's problems. Its second argument is the number of ranks, or None."""

RULES: tuple[Rule, ...] = (
    conflicts,
    bounds,
    model_rules.head_size,
    model_rules.no_rope,
    model_rules.query_groups,
    attention_rules.latent_attention,
    attention_rules.shared_keys,
    model_rules.bert,
    expert_rules.experts,
    recurrent_rules.recurrent_layers,
    recurrent_rules.delta_net_heads,
    recurrent_rules.exchanged_recurrent_heads,
    recurrent_rules.hybrid_pattern,
    recurrent_rules.mamba_heads,
    model_rules.qk_clip,
    model_rules.window,
    parallel_rules.tensor_parallel,
    attention_rules.grouped_heads,
    expert_rules.expert_parallel,
    expert_rules.imbalance,
    expert_rules.audited_experts,
    parallel_rules.context_levels,
    attention_rules.comm_types_of_layers,
    attention_rules.exchanged_heads,
    attention_rules.assigned_documents,
    parallel_rules.sequence,
    parallel_rules.chunks,
    parallel_rules.split,
    parallel_rules.layers,
    attention_rules.keys_within_stages,
    parallel_rules.microbatches,
    parallel_rules.world,
    parallel_rules.batch,
    parallel_rules.modules,
    parallel_rules.saved_slices,
    parallel_rules.offloaded_layers,
    training_rules.ramp_up,
    training_rules.batch_size_schedule,
    training_rules.seq_length_schedule,
    training_rules.enough_samples,
    training_rules.warmup,
    training_rules.step_timing,
    training_rules.wsd,
    parallel_rules.shard_groups,
    model_rules.fp8,
    training_rules.run_length,
    training_rules.eval_tasks,
    training_rules.hang_timeout,
    logging_rules.pipeline_trace,
    data_rules.finetune,
    data_rules.no_load_optim,
    data_rules.corpus,
    data_rules.training_split,
    data_rules.fill_in_middle,
    data_rules.document_ends,
    data_rules.tokenizer,
    logging_rules.profiled_ranks,
    logging_rules.layer_norms,
    data_rules.dry_run_rank,
    data_rules.dry_run_json,
)
"""Every rule between fields, in the order of their messages."""


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
