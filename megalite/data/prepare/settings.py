"""Build dataclasses from mappings of a YAML file: their fields are the keys, and their types the rules."""

from __future__ import annotations

import types
import typing
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, TypeVar

from megalite.config.arguments import nearest_hint

Settings = TypeVar("Settings")


def build_settings(
    kind: type[Settings], where: str, given: object, problems: list[str], **others: Any
) -> Settings | None:
    """Return an object of a dataclass, or None after appending what is wrong to `problems`.

    A field of a dataclass is a section. Numbers are positive, or at least `least` and at most `most` of the
    field's metadata. One text stands for a tuple of one.

    Args:
        where: what the messages begin with.
        given: the mapping.
        others: values of fields that are no keys.
    """
    if not isinstance(given, dict):
        problems.append(f"{where} is {given!r}: write `key: value` lines under it")
        return None
    known = {each.name: each for each in fields(kind) if each.name not in others}  # type: ignore[arg-type]
    before, hints = len(problems), typing.get_type_hints(kind)
    for key in given:
        if key not in known:
            problems.append(f"{where}: {key!r} is unknown{nearest_hint(str(key), known)}")
    values = dict(others)
    for name, each in known.items():
        if name in given:
            values[name] = _value(hints[name], each, f"{where}: {name}", given[name], problems)
        elif each.default is MISSING and each.default_factory is MISSING:
            problems.append(f"{where}: {name} is missing")
    return None if len(problems) > before else kind(**values)


def _value(kind: Any, each: Field[Any], where: str, value: object, problems: list[str]) -> object:
    """Return a value as its field holds it; append what is wrong with it."""
    if isinstance(kind, types.UnionType):
        kind, none = typing.get_args(kind)
        assert none is types.NoneType
        if value is None or value is False:
            return None
    if is_dataclass(kind):
        assert isinstance(kind, type)
        return build_settings(kind, where, value, problems)
    if kind == tuple[str, ...] and isinstance(value, str):
        return (value,)
    least, most = each.metadata.get("least", 1), each.metadata.get("most", 1 << 62)
    is_right, what = {
        str: (isinstance(value, str) and value != "", "a text"),
        bool: (isinstance(value, bool), "true or false"),
        int: (type(value) is int and least <= value <= most, f"a whole number from {least}"),
        float: (type(value) in (int, float) and 0 <= typing.cast(float, value) <= 1, "a number from 0 to 1"),
        list[Any]: (isinstance(value, list), "a list"),
        dict[str, Any]: (isinstance(value, dict), "`key: value` lines under it"),
        tuple[str, ...]: (
            isinstance(value, list) and all(isinstance(item, str) for item in value),
            "a text or a list of texts",
        ),
    }.get(kind) or (value in typing.get_args(kind), " or ".join(map(str, typing.get_args(kind))))
    if not is_right:
        limit = f" to {most}" if kind is int and most < 1 << 62 else ""
        problems.append(f"{where} is {value!r}: write {what}{limit}")
    return tuple(value) if is_right and isinstance(value, list) and kind == tuple[str, ...] else value
