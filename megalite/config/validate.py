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
    conflicts,
    data_rules,
    model_rules,
    parallel_rules,
    sizes,
    training_rules,
)
from megalite.utils.errors import ConfigError, Problem, one_line, shortened

Rule = Callable[[Config, int | None], Iterator[Problem]]
"""A function that yields a config's problems. Its second argument is the number of ranks, or None."""

_MODULES = (
    *(conflicts, sizes, attention_rules, model_rules, parallel_rules),
    *(training_rules, data_rules),
)
_OF_A_RULE = {"config": "Config", "world_size": "int | None", "return": "Iterator[Problem]"}
"""Parameters and result of a rule."""
RULES: tuple[Rule, ...] = tuple(
    dict.fromkeys(
        each
        for module in _MODULES
        for each in vars(module).values()
        if getattr(each, "__annotations__", None) == _OF_A_RULE
    )
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
