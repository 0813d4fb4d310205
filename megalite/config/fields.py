"""The fields of the config as flags: their names, their types, and the nearest name to a typo."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple, Union

from megalite.config.config import Config
from megalite.config.flags import flag_of, flags_in


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name nearest to a typo: the shortest that begins with it, else the most similar."""
    names = sorted(known)
    begins = [candidate for candidate in names if candidate.startswith(name)]
    return min(begins, key=len) if begins else get_close_matches(name, names, n=1, cutoff=0.0)[0]


_GROUPS: Mapping[str, type] = typing.get_type_hints(Config)


class ValueKind(NamedTuple):
    """Hold the type of a field.

    Attributes:
        item: type of the value, or of an element of a tuple.
        choices: the allowed values; empty if any value is allowed.
        is_many: the field is a tuple.
        is_optional: the field may be None.
    """

    item: type
    choices: tuple[str, ...]
    is_many: bool
    is_optional: bool


@dataclass(frozen=True)
class ConfigField:
    """Hold one field of one sub-config, with all its names on the command line."""

    group: str
    name: str
    kind: ValueKind
    default: Any
    flags: tuple[str, ...]
    """Flags that take the field's value; the first is the field's own name."""
    sets: Mapping[str, Any]
    """Flags without a value, each with the value that it sets."""


@functools.cache
def config_fields() -> tuple[ConfigField, ...]:
    """Return all fields of the config, group by group."""
    return tuple(field for group, part in _GROUPS.items() for field in _fields_of(group, part))


@functools.cache
def fields_by_flag() -> Mapping[str, ConfigField]:
    """Return the field of every flag; no two fields share a flag."""
    table: dict[str, ConfigField] = {}
    for field in config_fields():
        for flag in (*field.flags, *field.sets):
            assert flag not in table, flag
            table[flag] = field
    return table


def normalised(name: str) -> str:
    """Return a flag with dashes, as the tables have it: `--tensor_model_parallel_size` is also accepted."""
    return name.replace("_", "-")


def field_docs(group: str) -> dict[str, str]:
    """Return the docstring under each field of a group, as one line; read from the source of the class."""
    source = textwrap.dedent(inspect.getsource(_GROUPS[group]))
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for statement, following in itertools.pairwise(definition.body):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=text)):
                docs[name] = " ".join(str(text).split())
    return docs


def _fields_of(group: str, part: type) -> list[ConfigField]:
    hints = typing.get_type_hints(part)
    found = []
    for field in fields(part):
        kind, declared = _kind(hints[field.name]), flags_in(field.metadata)
        flags, sets = (flag_of(field.name), *declared.aliases), dict(declared.sets or {})
        if kind.item is bool:
            sets |= {f"--no-{name[2:]}": False for name in flags}
        found.append(ConfigField(group, field.name, kind, field.default, flags, sets))
    return found


def _kind(hint: Any) -> ValueKind:
    """Read a type hint such as `int`, `int | None`, `tuple[int, ...] | None` or `Literal[...]`."""
    is_optional = is_many = False
    if typing.get_origin(hint) in (Union, types.UnionType):
        (hint,) = (member for member in typing.get_args(hint) if member is not type(None))
        is_optional = True
    if typing.get_origin(hint) is tuple:
        hint, _ = typing.get_args(hint)
        is_many = True
    if typing.get_origin(hint) is Literal:
        return ValueKind(str, typing.get_args(hint), is_many, is_optional)
    return ValueKind(hint, (), is_many, is_optional)
