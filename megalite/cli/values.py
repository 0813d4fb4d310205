"""Words of a command line or a YAML file as the value of a field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megalite.cli.fields import ConfigField, Kind
from megalite.cli.hints import nearest

_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")
_WANTED = {int: "a whole number", float: "a number", bool: "True or False", str: "a word"}


def value_of(field: ConfigField, words: Sequence[str]) -> Any:
    """The field's value in these words.

    Raises:
        ValueError: the words are none; the message says what is wanted, without the field's name.
    """
    if field.kind.is_many:
        if not words:
            raise ValueError(f"needs at least one value, {_WANTED[field.kind.item]}")
        return tuple(_item(field.kind, word) for word in words)
    if field.kind.item is bool and not words:
        return True
    if len(words) != 1:
        got = f"{len(words)}: {' '.join(words)}" if words else "none"
        raise ValueError(f"takes one value, {_WANTED[field.kind.item]}, but got {got}")
    return _item(field.kind, words[0])


def _item(kind: Kind, word: str) -> Any:
    if kind.choices and word not in kind.choices:
        raise ValueError(
            f"cannot be {word!r}: choose one of {', '.join(kind.choices)}; "
            f"nearest is {nearest(word, kind.choices)}"
        )
    if kind.item is bool:
        return _bool(word)
    try:
        return kind.item(word)
    except ValueError:
        raise ValueError(f"takes {_WANTED[kind.item]}, not {word!r}") from None


def _bool(word: str) -> bool:
    if word.lower() not in _TRUE + _FALSE:
        raise ValueError(f"takes {_WANTED[bool]}, not {word!r}")
    return word.lower() in _TRUE
