"""The flags of a config field, declared in the dataclass field's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_KEY = "flags"


@dataclass(frozen=True)
class Flags:
    """Declares the flags of a field besides its own name with dashes."""

    aliases: tuple[str, ...] = ()
    """More flags that take the field's value, such as `--tp`."""
    sets: Mapping[str, Any] | None = None
    """Flags without a value, each with the value that it sets, such as `--swiglu`."""
    choices: Mapping[str, str] | None = None
    """Names that other programs use for values, each with the value that it means."""
    missing: Mapping[str, str] | None = None
    """Values of other programs that megalite does not have, each with what to do instead."""


def flags(
    *aliases: str,
    sets: Mapping[str, Any] | None = None,
    choices: Mapping[str, str] | None = None,
    missing: Mapping[str, str] | None = None,
) -> dict[str, Flags]:
    """Return the metadata of a dataclass field that has flags besides its own name; see `Flags`."""
    return {_KEY: Flags(aliases, sets, choices, missing)}


def flags_in(metadata: Mapping[Any, Any]) -> Flags:
    """Return the `Flags` in a dataclass field's metadata; empty ones where the field declares none."""
    found = metadata.get(_KEY, Flags())
    assert isinstance(found, Flags)
    return found


def flag_of(name: str) -> str:
    """Return the flag of a field: `--num-layers` for `num_layers`."""
    return f"--{name.replace('_', '-')}"


def flag_tokens(name: str, value: Any) -> list[str]:
    """Return a field and its value as tokens of a command line.

    A field that is True becomes its flag alone, and a field that is False becomes ``--no-NAME``.
    """
    if isinstance(value, bool):
        return [flag_of(name) if value else f"--no-{flag_of(name)[2:]}"]
    return [flag_of(name), *(map(format_value, value) if isinstance(value, tuple) else [str(value)])]


def flag_with_value(name: str, value: Any) -> str:
    """Return a field and its value as on a command line: `--lr 0.1`, `--finetune`, `--no-load-optim`."""
    return " ".join(flag_tokens(name, value))


def format_value(value: Any) -> str:
    """Return a value as on a command line; the elements of a tuple are separated by spaces."""
    return " ".join(map(format_value, value)) if isinstance(value, tuple) else str(value)
