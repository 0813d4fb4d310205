"""The table of Megatron-LM's and Megatron-DeepSpeed's flags, from what the command line itself reads."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.cli.fields import ConfigField, config_fields
from megalite.cli.findings import Findings
from megalite.cli.future import FUTURE
from megalite.cli.legacy import Line, Rule, legacy_rules
from megalite.cli.words import Given
from megalite.config import Config

BEGIN, END = "<!-- made by python -m docs.make -->", "<!-- end -->"
CHECKED = {
    "--deepspeed-config": "is read and compared with the flags; a conflict is an error that names both",
    "--group-query-attention": "`--num-query-groups` turns it on, and must be given with it",
    "--local-rank": "is read from LOCAL_RANK, and must be the same",
}
"""Flags whose use is to be compared with something else."""


def flag_table() -> str:
    """Markdown of three tables: flags that set something, flags that need nothing, flags that are refused."""
    return "\n".join([*_fields(), "", *_accepted(), "", *_refused()])


def _fields() -> Iterator[str]:
    yield "### Flags that are honoured"
    yield ""
    yield "| here | other names of it |"
    yield "|---|---|"
    for field in config_fields():
        others = [*(f"`{flag}`" for flag in field.flags[1:]), *_values(field)]
        if others:
            yield f"| `{field.flags[0]}` | {', '.join(others)} |"
    alone = sorted(field.flags[0] for field in config_fields() if not field.flags[1:] and not _values(field))
    yield ""
    yield "Those with one name alone, and for a switch its `--no-` form:"
    yield ", ".join(f"`{flag}`" for flag in alone) + "."


def _values(field: ConfigField) -> list[str]:
    """Flags without a value that are not the name and its opposite."""
    plain = {*field.flags, *(f"--no-{flag[2:]}" for flag in field.flags)}
    return [f"`{flag}` (for {_word(value)})" for flag, value in field.sets.items() if flag not in plain]


def _word(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else f"`{value}`"


def _accepted() -> Iterator[str]:
    yield "### Flags that are read, and need nothing"
    yield ""
    yield "| flag | why |"
    yield "|---|---|"
    refused = {f"--{flag}" for entry in FUTURE for flag in entry.flags.split()}
    for flag, rule in sorted(legacy_rules().items()):
        if flag not in refused:
            shown, why = _reason(flag, rule)
            yield f"| `{shown}` | {why} |"


def _reason(flag: str, rule: Rule) -> tuple[str, str]:
    """The flag, with the one value that it takes, and why nothing is to be done: as a run says it."""
    if flag in CHECKED:
        return flag, CHECKED[flag]
    found = Findings()
    for words in ((), ("1",)):
        rule(Given(flag, flag, words), Line(Config(), {}, None), found)
    text = [*found.notices, *found.problems][0]
    value = f" {text.split()[2]}" if " alone in this version" in text else ""
    return flag + value, text.partition(": ")[2]


def _refused() -> Iterator[str]:
    yield "### Flags that are refused"
    yield ""
    yield "| flag | asks for | instead |"
    yield "|---|---|---|"
    for entry in FUTURE:
        flags = ", ".join(f"`--{flag}`" for flag in sorted(entry.flags.split()))
        yield f"| {flags} | {entry.what} | {entry.fix} |"
