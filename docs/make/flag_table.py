"""Generate the table of Megatron-LM and Megatron-DeepSpeed flags from the command-line parser."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config import Config
from megalite.config.arguments import Diagnostics, FlagTokens
from megalite.config.fields import ConfigField, config_fields
from megalite.config.megatron_compatibility import UNSUPPORTED, CommandLine, FlagRule, megatron_rules

BEGIN, END = "<!-- made by python -m docs.make -->", "<!-- end -->"
CHECKED = {
    "--deepspeed-config": "compared with the flags; a conflict is an error that names both",
    "--group-query-attention": "`--num-query-groups` enables it, and is required with it",
    "--local-rank": "must equal the environment variable LOCAL_RANK",
}
"""Flags whose value is only checked against other settings."""


def flag_table() -> str:
    """Return three Markdown tables: flags that are honoured, flags without effect, and refused flags."""
    return "\n".join([*_fields(), "", *_accepted(), "", *_refused()])


def _fields() -> Iterator[str]:
    yield "### Supported flags"
    yield ""
    yield "| flag | aliases |"
    yield "|---|---|"
    for field in config_fields():
        others = [*(f"`{flag}`" for flag in field.flags[1:]), *_values(field)]
        if others:
            yield f"| `{field.flags[0]}` | {', '.join(others)} |"
    alone = sorted(field.flags[0] for field in config_fields() if not field.flags[1:] and not _values(field))
    yield ""
    yield "Flags without an alias (a switch also has a `--no-` form):"
    yield ", ".join(f"`{flag}`" for flag in alone) + "."


def _values(field: ConfigField) -> list[str]:
    """Return the flags without a value, except for the name and its `--no-` form."""
    plain = {*field.flags, *(f"--no-{flag[2:]}" for flag in field.flags)}
    return [f"`{flag}` (for {_word(value)})" for flag, value in field.sets.items() if flag not in plain]


def _word(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else f"`{value}`"


def _accepted() -> Iterator[str]:
    yield "### Flags accepted without effect"
    yield ""
    yield "| flag | reason |"
    yield "|---|---|"
    unsupported = {f"--{flag}" for entry in UNSUPPORTED for flag in entry.flags.split()}
    for flag, rule in sorted(megatron_rules().items()):
        if flag not in unsupported:
            shown, why = _reason(flag, rule)
            yield f"| `{shown}` | {why} |"


def _reason(flag: str, rule: FlagRule) -> tuple[str, str]:
    """Return the flag, with its only accepted value if any, and the reason that a run prints."""
    if flag in CHECKED:
        return flag, CHECKED[flag]
    found = Diagnostics()
    for values in ((), ("1",)):
        rule(FlagTokens(flag, flag, values), CommandLine(Config(), {}, None), found)
    text = [*found.notices, *found.problems][0]
    value = f" {text.split()[3]}" if " only accepts " in text else ""
    return flag + value, text.partition(": ")[2]


def _refused() -> Iterator[str]:
    yield "### Refused flags"
    yield ""
    yield "| flag | feature | instead |"
    yield "|---|---|---|"
    for entry in UNSUPPORTED:
        flags = ", ".join(f"`--{flag}`" for flag in sorted(entry.flags.split()))
        yield f"| {flags} | {entry.what} | {entry.fix} |"
