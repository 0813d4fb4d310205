"""Write config fields and their values as flags."""

from __future__ import annotations

from typing import Any


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
