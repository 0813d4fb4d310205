"""Parse the arguments of a command line: flags, their values, and errors in them."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megalite.config.fields import MAX_INT, ConfigField, nearest_hint, normalised
from megalite.config.option import format_value
from megalite.utils.errors import shortened

_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")
_MAX_TIMES = 4096  # repetitions in a list, so that a typo does not fill the memory
_KIND_NAMES = {int: "a whole number", float: "a number", bool: "True or False", str: "a string"}


class FlagTokens(NamedTuple):
    """Flag of the command line and its values.

    Attributes:
        name: the flag as the user wrote it.
        flag: the same with dashes, as in the tables of flags.
        values: the tokens between it and the next flag.
    """

    name: str
    flag: str
    values: tuple[str, ...]

    @property
    def tokens(self) -> tuple[str, ...]:
        """Return the argument tokens that `split_tokens` would read as this flag."""
        if self.values and _is_flag(self.values[0]):
            return f"{self.name}={self.values[0]}", *self.values[1:]
        return self.name, *self.values


class UserSetting(NamedTuple):
    """Value that a user set for a field.

    Attributes:
        name: what the user wrote: `--tp`, or `run.yaml line 3: tp`.
        text: the value as the user wrote it, if it does not come from a flag.
    """

    field: ConfigField
    value: Any
    name: str
    text: str | None = None


@dataclass
class Diagnostics:
    """Errors and notices, collected so that one run reports all of them."""

    problems: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    invalid_fields: set[str] = field(default_factory=set)
    """Fields whose value could not be read. Rules that depend on them are not checked."""

    def add_problem(self, problem: str, *invalid_fields: str) -> None:
        """Add an error, and the fields that have no valid value because of it."""
        self.problems.append(problem)
        self.invalid_fields.update(invalid_fields)

    def by_field(self, settings: Iterable[UserSetting]) -> dict[str, UserSetting]:
        """Return the last setting of each field; two names of a field with different values are an error."""
        chosen: dict[str, UserSetting] = {}
        for setting in settings:
            name = setting.field.name
            before = chosen.get(name, setting)
            if before.value != setting.value:
                both = f"{_as_written(before)} and {_as_written(setting)}"
                if before.name == setting.name:
                    self.notices.append(f"{both} are both passed: the last one is used")
                else:
                    self.add_problem(f"{both} set the same option: remove one", name)
            chosen[name] = setting
        return chosen


def _as_written(setting: UserSetting) -> str:
    is_valueless = setting.name.replace("_", "-") in setting.field.sets  # --bf16
    text = format_value(setting.value) if setting.text is None else setting.text
    return setting.name if is_valueless else f"{setting.name} {text}"


def split_tokens(argv: Sequence[str]) -> tuple[list[FlagTokens], list[str]]:
    """Split an argument list before each flag.

    Returns:
        The flags, and the tokens before the first one.
    """
    stray: list[str] = []
    flags: list[FlagTokens] = []
    for token in argv:
        if _is_flag(token):
            name, equals, value = token.partition("=")
            flags.append(FlagTokens(name, normalised(name), (value,) if equals else ()))
        elif flags:
            flags[-1] = flags[-1]._replace(values=(*flags[-1].values, token))
        else:
            stray.append(token)
    return flags, stray


def _is_flag(token: str) -> bool:
    if not token.startswith("-") or token == "-":
        return False
    try:
        float(token)  # a negative number is a value
    except ValueError:
        return True
    return False


def parse_value(field: ConfigField, tokens: Sequence[str]) -> Any:
    """Parse the value of a field from its tokens.

    Raises:
        ValueError: the tokens are not a value of the field; the message continues the field's name.
    """
    kind = field.kind
    if kind.is_many:
        if not tokens:
            raise ValueError(f"needs at least one value, {_KIND_NAMES[kind.item]}")
        items = tuple(_parse_item(field, item) for token in tokens for item in _listed(token, kind.item))
        return items[0] if kind.unpacks_one and len(items) == 1 else items
    if kind.item is bool and not tokens:
        return True
    if len(tokens) != 1:
        found = f"{len(tokens)}: {' '.join(tokens)}" if tokens else "none"
        raise ValueError(f"takes one value, {_KIND_NAMES[kind.item]}, but got {found}")
    return _parse_item(field, tokens[0])


def _listed(token: str, item: type) -> Sequence[str]:
    """Return the items of a token, which may be a list of numbers in Python: `(3,5)`, `[1]*3+[0]`."""
    if item is not int or not any(character in token for character in ",[("):
        return (token,)
    try:
        value = _list_value(ast.parse(token, mode="eval").body)
    except (SyntaxError, ValueError):
        return (token,)  # the error message contains the whole token
    return [str(number) for number in value]


def _list_value(node: ast.expr) -> list[int]:
    match node:
        case ast.Tuple(elts=items) | ast.List(elts=items):
            return [ast.literal_eval(item) for item in items]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _list_value(left) + _list_value(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=ast.Constant(value=int(times))) if times <= _MAX_TIMES:
            return _list_value(left) * times
        case ast.Constant(value=int(number)):  # in parentheses
            return [number]
    raise ValueError


def _parse_item(field: ConfigField, token: str) -> Any:
    kind = field.kind
    if kind.choices:
        if token.lower() in field.choices:
            return field.choices[token.lower()]
        if fix := (field.declared.missing or {}).get(token.lower()):
            raise ValueError(f"{token} is not supported in this version: {fix}")
        raise ValueError(
            f"cannot be {token!r}: choose one of {', '.join(kind.choices)}{nearest_hint(token, kind.choices)}"
        )
    if kind.item is bool:
        if token.lower() not in _TRUE + _FALSE:
            raise ValueError(f"takes {_KIND_NAMES[bool]}, not {token!r}")
        return token.lower() in _TRUE
    if kind.item is str and token.startswith("~/"):  # a shell expands it, but not in a file or after `=`
        token = os.path.expanduser(token)
    try:
        value = kind.item(token)
    except ValueError:
        raise ValueError(f"takes {_KIND_NAMES[kind.item]}, not {shortened(token)!r}") from None
    if isinstance(value, int) and abs(value) > MAX_INT:
        raise ValueError(f"takes {_KIND_NAMES[kind.item]} of at most 2**63 - 1, not {shortened(token)!r}")
    return value
