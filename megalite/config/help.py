"""The text of `--help`, from the fields and the docstrings under them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from megalite.config.fields import ConfigField, ValueKind, config_fields, field_docs
from megalite.config.flags import format_value
from megalite.config.megatron_compatibility import megatron_help
from megalite.config.presets import PRESETS

_WIDTH = 110
_METAVARS = {int: "INT", float: "FLOAT", str: "TEXT"}


def help_text(program: str) -> str:
    """Return the help text of a program: every flag, with its field's docstring and default."""
    return "\n".join(_lines(program)) + "\n"


def _lines(program: str) -> Iterator[str]:
    yield f"usage: {program} [--preset NAME] [--config FILE.yaml] [flags]"
    yield ""
    yield "Flags override the YAML file, which overrides the preset. Names may be written with - or _."
    yield ""
    yield from _entry(["--preset NAME"], f"A published or tiny model: {', '.join(PRESETS)}.")
    yield from _entry(
        ["--config FILE.yaml"], "Read settings from a YAML file, as --print-config writes them."
    )
    yield from _entry(
        ["--override-flags"],
        "Let flags after this one replace those before it: for scripts that pass on a user's flags.",
    )
    yield from _entry(["--print-config"], "Print all settings as YAML, and exit.")
    yield from _entry(["--help", "-h"], "Print this help, and exit.")
    group = None
    for field in config_fields():
        if field.group != group:
            group, docs = field.group, field_docs(field.group)
            yield from ("", f"{group}:")
        yield from _entry(_names(field), f"{docs[field.name]} {_default(field)}")
    for title, flags in megatron_help():
        yield from ("", f"{title}:")
        yield from _wrapped(" ".join(flags), 2)


def _entry(names: Iterable[str], text: str) -> Iterator[str]:
    yield from _wrapped(", ".join(names), 2)
    yield from _wrapped(text, 6)


def _wrapped(text: str, indent: int) -> list[str]:
    margin = " " * indent
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=margin,
        subsequent_indent=margin,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _names(field: ConfigField) -> list[str]:
    value = _metavar(field.kind)
    return [*(f"{flag} {value}".rstrip() for flag in field.flags), *field.sets]


def _metavar(kind: ValueKind) -> str:
    if kind.item is bool:
        return "[True|False]"
    one = "{" + ", ".join(kind.choices) + "}" if kind.choices else _METAVARS[kind.item]
    return f"{one} [{one} ...]" if kind.is_many else one


def _default(field: ConfigField) -> str:
    if field.default is None or field.default == ():
        return ""
    return f"(default: {format_value(field.default)})"
