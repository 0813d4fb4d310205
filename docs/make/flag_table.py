"""Generate the table of all flags by topic from the command-line parser."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.fields import ConfigField, config_fields, field_docs
from megalite.config.megatron_flags import ACCEPTED, ACCEPTED_IF_OFF, TOPICS, UNSUPPORTED

BEGIN, END = "<!-- made by python -m docs.make -->", "<!-- end -->"
CHECKED = {
    "parallel": {
        "--local-rank": "must equal the environment variable LOCAL_RANK",
    },
    "model": {"--group-query-attention": "`--num-query-groups` enables it, and is required with it"},
    "training": {
        "--accumulate-allreduce-grads-in-fp32": "gradient sums are in fp32; refused with bf16 communication"
    },
}
"""Flags whose value is only checked against other settings, by topic."""


def flag_table() -> str:
    """Return a Markdown table for each topic: flags, and what megalite does with them."""
    return "\n".join(line for topic, title in TOPICS.items() for line in _table(topic, title))


def _table(topic: str, title: str) -> Iterator[str]:
    yield from (f"### {title}", "", "| flag | in megalite |", "|---|---|")
    docs = field_docs(topic)
    for field in config_fields():
        if field.group == topic:
            names = ", ".join((_code(*field.flags), *_values(field)))
            yield f"| {names} | {_first_sentence(docs[field.name])} |"
    for flag, text in CHECKED.get(topic, {}).items():
        yield f"| {_code(flag)} | checked: {text} |"
    for accepted in ACCEPTED:
        if accepted.topic == topic:
            yield f"| {_code(*_dashed(accepted.flags))} | accepted, no effect: {accepted.why} |"
    for off in ACCEPTED_IF_OFF:
        if off.topic == topic:
            values = " or ".join(f"`{value}`" for value in off.off.split())
            yield f"| {_code(off.flag)} | only {values}: {off.what} is missing; {off.fix} |"
    for feature in UNSUPPORTED:
        if feature.topic == topic:
            names = [*_dashed(feature.flags), *(f"{flag}*" for flag in _dashed(feature.prefixes))]
            yield f"| {_code(*names)} | refused, {feature.what}: {feature.fix} |"
    yield ""


def _dashed(flags: str) -> list[str]:
    return [f"--{flag}" for flag in sorted(flags.split())]


def _code(*flags: str) -> str:
    return ", ".join(f"`{flag}`" for flag in flags)


def _first_sentence(text: str) -> str:
    return text.partition(". ")[0].rstrip(".").replace("|", "\\|")


def _values(field: ConfigField) -> list[str]:
    """Return the flags without a value, except for the name and its `--no-` form."""
    plain = {*field.flags, *(f"--no-{flag[2:]}" for flag in field.flags)}
    return [f"`{flag}` (for {_word(value)})" for flag, value in field.sets.items() if flag not in plain]


def _word(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else f"`{value}`"
