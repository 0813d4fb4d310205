"""Make and check the configs of many layouts, which share most of their groups of fields.

Two layouts that differ in recomputation have the same `ParallelConfig`: the same object. What depends on it
alone is found once, such as its mesh, and the result of a rule that reads nothing else.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import fields, replace
from typing import Any

from megalite.config import Config
from megalite.config.layout_options import LAYOUT_FIELDS
from megalite.config.validate import RULES, Rule
from megalite.errors import Problem
from megalite.plan.layout_fields import with_even_stages
from megalite.plan.planned_run import with_any_length

GROUPS = frozenset(group.name for group in fields(Config))
Groups = tuple[str, ...]
"""Names of groups of fields, in order."""


class LayoutConfigs:
    """Makes configs that differ from a base in fields of the layout, with stages as even as possible."""

    def __init__(self, base: Config) -> None:
        self._base = base
        self._made: dict[Hashable, Any] = {}

    def config(self, values: Mapping[str, Any]) -> Config:
        """Return the config with these values of `LAYOUT_FIELDS`."""
        changes: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            changes.setdefault(LAYOUT_FIELDS[name], {})[name] = value
        return replace(self._base, **{name: self._group(name, own) for name, own in changes.items()})

    def _group(self, name: str, changes: Mapping[str, Any]) -> Any:
        key = (name, *changes.items())
        if key not in self._made:
            changed = replace(self._base, **{name: replace(getattr(self._base, name), **changes)})
            self._made[key] = getattr(with_even_stages(changed), name)
        return self._made[key]


class _Watched(Config):
    """Has only those groups of a config that have been read."""

    def __init__(self, config: Config) -> None:
        vars(self)["whole"] = config

    def __getattr__(self, name: str) -> Any:
        """Return a group that is read for the first time."""
        value = vars(self)[name] = getattr(vars(self)["whole"], name)
        return value


class LayoutCheck:
    """Checks the rules between fields for many configs that share groups of fields.

    A rule depends on nothing but the groups that it reads. What it finds in some groups, it also finds in
    another config with the same ones.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._rules: dict[Groups, list[Rule]] = {(): list(RULES)}
        self._found: dict[Hashable, tuple[list[Any], bool]] = {}

    def first_problem(self, config: Config) -> Problem | None:
        """Return the first rule that the config breaks; the fields themselves are valid."""
        if self._accepts(config):
            return None
        problems = (problem for rule in RULES for problem in rule(with_any_length(config), self._world_size))
        return next(problems, None)

    def _accepts(self, config: Config) -> bool:
        for groups, rules in self._rules.items():
            values = [getattr(config, name) for name in groups]
            key = groups, *map(id, values)
            if key not in self._found:
                reads = [self._read_by(rule, config) for rule in rules]
                if any(not {*groups}.issuperset(read) for read, _ in reads):
                    self._move(groups, [read for read, _ in reads])
                    return self._accepts(config)
                # The values are kept, so that no other object gets their ids.
                self._found[key] = values, all(is_kept for _, is_kept in reads)
            if not self._found[key][1]:
                return False
        return True

    def _read_by(self, rule: Rule, config: Config) -> tuple[Set[str], bool]:
        """Return the groups that a rule reads, and whether it accepts the config."""
        watched = _Watched(with_any_length(config))
        is_kept = not any(True for _ in rule(watched, self._world_size))
        return GROUPS & vars(watched).keys(), is_kept

    def _move(self, groups: Groups, reads: Sequence[Set[str]]) -> None:
        """Move the rules of some groups to all groups that each has read."""
        self._found.clear()
        for rule, read in zip(self._rules.pop(groups), reads, strict=True):
            self._rules.setdefault(tuple(sorted(read | {*groups})), []).append(rule)
