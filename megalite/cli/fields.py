"""The config's fields as flags: names, kinds, help. Everything here is read off the dataclasses."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, Union

from megalite.config import Config
from megalite.config.flags import flag_of, flags_in

_GROUPS: Mapping[str, type] = typing.get_type_hints(Config)


class Kind(NamedTuple):
    """What a field holds.

    Attributes:
        item: type of a value, or of an element where there are several.
        choices: the only words allowed; empty where any is.
        is_many: whether the field is a tuple.
        is_optional: whether it may be None.
    """

    item: type
    choices: tuple[str, ...]
    is_many: bool
    is_optional: bool


@dataclass(frozen=True)
class ConfigField:
    """One field of one sub-config, and every name it goes by on the command line."""

    group: str
    name: str
    kind: Kind
    default: Any
    flags: tuple[str, ...]
    """Flags that take the field's value, its own name first."""
    sets: Mapping[str, Any]
    """Flags without a value, each with the one that it stands for."""


@functools.cache
def config_fields() -> tuple[ConfigField, ...]:
    """All fields of the config, group by group."""
    return tuple(field for group, part in _GROUPS.items() for field in _fields_of(group, part))


@functools.cache
def fields_by_flag() -> Mapping[str, ConfigField]:
    """Every flag with its field; no two fields share one."""
    table: dict[str, ConfigField] = {}
    for field in config_fields():
        for flag in (*field.flags, *field.sets):
            assert flag not in table, flag
            table[flag] = field
    return table


def normalised(name: str) -> str:
    """A flag as the tables know it: `--tensor_model_parallel_size` is the same as with dashes."""
    return name.replace("_", "-")


def field_docs(group: str) -> dict[str, str]:
    """The docstring under each field of a group, in one line; read from the class's source."""
    source = textwrap.dedent(inspect.getsource(_GROUPS[group]))
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for statement, following in itertools.pairwise(definition.body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            docs[statement.target.id] = _docstring(following)
    return docs


def _docstring(statement: ast.stmt) -> str:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return " ".join(str(statement.value.value).split())
    return ""


def _fields_of(group: str, part: type) -> list[ConfigField]:
    hints = typing.get_type_hints(part)
    found = []
    for field in fields(part):
        kind, given = _kind(hints[field.name]), flags_in(field.metadata)
        flag = flag_of(field.name)
        flags, sets = (flag, *given.aliases), dict(given.sets or {})
        if kind.item is bool:
            sets |= {f"--no-{name[2:]}": False for name in flags}
        found.append(ConfigField(group, field.name, kind, field.default, flags, sets))
    return found


def _kind(hint: Any) -> Kind:
    """Reads `int`, `int | None`, `tuple[int, ...] | None`, `Literal[...]` and the like."""
    is_optional = is_many = False
    if typing.get_origin(hint) in (Union, types.UnionType):
        (hint,) = (member for member in typing.get_args(hint) if member is not type(None))
        is_optional = True
    if typing.get_origin(hint) is tuple:
        hint, _ = typing.get_args(hint)
        is_many = True
    if typing.get_origin(hint) is Literal:
        return Kind(str, typing.get_args(hint), is_many, is_optional)
    return Kind(hint, (), is_many, is_optional)
