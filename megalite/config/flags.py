"""What a config field says about its flags, kept in the dataclass field's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_KEY = "flags"


@dataclass(frozen=True)
class Flags:
    """The flags of a field beyond its own name with dashes."""

    aliases: tuple[str, ...] = ()
    """Further flags that take the field's value, such as `--tp`."""
    sets: Mapping[str, Any] | None = None
    """Flags without a value, each with the one that it stands for, such as `--swiglu`."""


def flags(*aliases: str, sets: Mapping[str, Any] | None = None) -> dict[str, Flags]:
    """Metadata for a dataclass field that has flags besides its own name; see `Flags`."""
    return {_KEY: Flags(aliases, sets)}


def flags_in(metadata: Mapping[Any, Any]) -> Flags:
    """The `Flags` in a dataclass field's metadata; without any where the field declares none."""
    found = metadata.get(_KEY, Flags())
    assert isinstance(found, Flags)
    return found


def flag_of(name: str) -> str:
    """The flag that is a field's own name."""
    return f"--{name.replace('_', '-')}"
