"""The text of `--help`, from the fields and the docstrings under them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from megalite.cli.fields import ConfigField, Kind, config_fields, field_docs
from megalite.cli.findings import shown
from megalite.cli.legacy import legacy_help
from megalite.presets import PRESETS

_WIDTH = 110
_WORDS = {int: "INT", float: "FLOAT", str: "TEXT"}


def help_text(program: str) -> str:
    """Everything that a command line can say."""
    return "\n".join(_lines(program)) + "\n"


def _lines(program: str) -> Iterator[str]:
    yield f"usage: {program} [--preset NAME] [--config FILE.yaml] [flags]"
    yield ""
    yield "Flags go over the YAML file, the YAML file over the preset. Names may be written with - or _."
    yield ""
    yield from _entry(["--preset NAME"], f"A model by name: {', '.join(PRESETS)}.")
    yield from _entry(["--config FILE.yaml"], "Settings, as --print-config writes them.")
    yield from _entry(
        ["--override-flags"],
        "Flags behind it replace those before it: for scripts that pass on flags of theirs.",
    )
    yield from _entry(["--print-config"], "Print every setting as YAML, and exit.")
    yield from _entry(["--help", "-h"], "Print this, and exit.")
    group = None
    for field in config_fields():
        if field.group != group:
            group, docs = field.group, field_docs(field.group)
            yield from ("", f"{group}:")
        yield from _entry(_names(field), f"{docs[field.name]} {_default(field)}")
    for title, flags in legacy_help():
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


def _metavar(kind: Kind) -> str:
    if kind.item is bool:
        return "[True|False]"
    word = "{" + ", ".join(kind.choices) + "}" if kind.choices else _WORDS[kind.item]
    return f"{word} [{word} ...]" if kind.is_many else word


def _default(field: ConfigField) -> str:
    if field.default is None or field.default == ():
        return ""
    return f"(default: {shown(field.default)})"
