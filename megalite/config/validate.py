"""All of a config's mistakes at once."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import fields, replace

from megalite.config.config import Config
from megalite.config.problem import Problem, Rule, one_line
from megalite.config.ranges import range_problems
from megalite.config.rules import (
    batch_size,
    checkpoint,
    corpus,
    dry_run,
    layout,
    learning_rate,
    model,
    pipeline,
    precision,
    recompute,
    run,
)
from megalite.errors import ConfigError

RULES: tuple[Rule, ...] = (
    model.head_size,
    model.query_groups,
    model.attention_backend,
    model.position_table,
    layout.tensor_parallel,
    layout.grouped_heads,
    layout.sequence_parallel,
    pipeline.chunks,
    pipeline.split,
    pipeline.layers,
    pipeline.microbatches,
    layout.world,
    layout.batch,
    recompute.num_layers,
    recompute.modules,
    recompute.saved_slices,
    batch_size.ramp_up,
    batch_size.enough_samples,
    learning_rate.bounds,
    learning_rate.unit,
    learning_rate.warmup,
    learning_rate.wsd,
    learning_rate.weight_decay,
    precision.loss_scale,
    precision.gradient_messages,
    precision.zero_stage,
    precision.fp8,
    run.required,
    run.local_paths,
    run.skipped_iterations,
    run.hang_timeout,
    run.pipeline_trace,
    checkpoint.schedule,
    checkpoint.non_persistent,
    checkpoint.model,
    checkpoint.finetune,
    checkpoint.no_load_optim,
    corpus.given,
    corpus.train_part,
    corpus.weighted_split_files,
    corpus.fill_in_middle,
    corpus.document_ends,
    run.split,
    run.tokenizer,
    run.profiler,
    run.profiled_ranks,
    run.layer_norms,
    dry_run.rank_of_world,
    dry_run.whole_weights,
    dry_run.json_folder,
)
"""Every rule between fields; a new one is a function and a line here."""


def check_config(config: Config, world_size: int | None = None) -> None:
    """Checks every field and every rule between fields.

    Args:
        world_size: ranks that were started; None leaves out what depends on it.

    Raises:
        ConfigError: with all mistakes, each naming the flags, their values and the fix.
    """
    if problems := problems_of(config, world_size):
        raise ConfigError(problems)


def problems_of(config: Config, world_size: int | None, doubted: Collection[str] = ()) -> list[str]:
    """Everything that is wrong with a config, in words.

    Args:
        config: what to check.
        world_size: ranks that were started; None leaves out what depends on it.
        doubted: fields whose value is already known to be wrong; nothing that rests on them is told.
    """
    problems = [problem for problem in range_problems(config) if problem.fields[0] not in doubted]
    wrong = {*doubted, *(name for problem in problems for name in problem.fields)}
    sound = _with_defaults(config, wrong)
    problems += [
        problem for problem in _broken_rules(sound, world_size) if not wrong.intersection(problem.fields)
    ]
    return [one_line(problem.text) for problem in problems]


def _broken_rules(config: Config, world_size: int | None) -> Iterator[Problem]:
    for rule in RULES:
        yield from rule(config, world_size)


def _with_defaults(config: Config, names: Collection[str]) -> Config:
    """The config with these fields at their defaults, so that no rule divides by a zero in them."""
    parts = {}
    for group in fields(config):
        part = getattr(config, group.name)
        defaults = {field.name: field.default for field in fields(part) if field.name in names}
        parts[group.name] = replace(part, **defaults)
    return replace(config, **parts)
