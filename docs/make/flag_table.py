"""Generate the tables of all flags: by topic from the command-line parser, and Megatron's by number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from megalite.config.fields import ConfigField, config_fields, field_docs, normalised
from megalite.frontends import read_table
from megalite.frontends.command_line import known_flags
from megalite.frontends.megatron.conversions import (
    FSDP_FLAGS,
    LATENT_ROTARY_FLAGS,
    OFF_WITHOUT_LATENTS,
    TOKEN_FLAGS,
)
from megalite.frontends.megatron.rules import FlagGroup, flag_groups, missing_feature, refused_flags, rule_of

BEGIN, END = "<!-- made by python -m docs.make -->", "<!-- end -->"
CHECKED = {
    "parallel": {
        "--local-rank": "must equal the environment variable LOCAL_RANK",
        "--no-pipeline-parallel": "refused with `--pipeline-model-parallel-size` above 1",
    },
    "model": {
        "--group-query-attention": "`--num-query-groups` enables it, and is required with it",
        "--no-position-embedding": "accepted beside other positions than a learned table",
    },
    "training": {
        "--accumulate-allreduce-grads-in-fp32": "gradient sums are in fp32; refused with bf16 communication"
    },
}
"""Flags that are only checked against other settings, by topic."""
CONVERTED = {
    "training": ("--train-tokens",),
    "optimizer": ("--lr-decay-tokens", "--lr-warmup-tokens"),
}
"""Flags that are converted to fields, by topic."""


OUTCOMES = ("used", "no effect", "accepted while off", "refused")
"""What becomes of an argument of Megatron."""


def megatron_arguments() -> dict[str, list[str]]:
    """Return the flags of all arguments that Megatron's training scripts declare, by project."""
    text = (Path(__file__).parent / "megatron_arguments.txt").read_text(encoding="utf-8")
    sections = (section.partition("\n") for section in text.split("\n# ")[1:])
    return {title: [f"--{name}" for name in names.split()] for title, _, names in sections}


def outcome(flag: str) -> str:
    """Return one of `OUTCOMES`.

    Raises:
        LookupError: megalite does not know the flag.
    """
    flag = normalised(flag)
    rules = {name: OUTCOMES[1] for group in flag_groups("accepted") for name in group.flags}
    rules |= {name: OUTCOMES[2] for group in flag_groups("accepted_if_off") for name in group.flags}
    if flag in rules:
        return rules[flag]
    # A field may begin as a missing feature's flags do.
    if flag in known_flags() and flag not in refused_flags():
        return OUTCOMES[0]
    if missing_feature(flag):
        return OUTCOMES[3]
    if rule_of(flag) is None:
        raise LookupError(flag)
    return OUTCOMES[1]  # a `--no-` form


def flag_table() -> str:
    """Return Markdown tables: the numbers of Megatron's arguments, and the flags of each topic."""
    topics = read_table("megatron/flags.yaml")["topics"]
    tables = (_counts(), *(_table(topic, title) for topic, title in topics.items()))
    return "\n".join(line for table in tables for line in table)


def _counts() -> Iterator[str]:
    """Yield the lines of a table: the number of arguments of each project, by their outcome."""
    yield f"| arguments of | {' | '.join(OUTCOMES)} | all |"
    yield f"|---|{'---:|' * (len(OUTCOMES) + 1)}"
    for project, flags in megatron_arguments().items():
        counts = Counter(map(outcome, flags))
        yield f"| {project} | {' | '.join(str(counts[each]) for each in OUTCOMES)} | {len(flags)} |"
    yield ""


def _table(topic: str, title: str) -> Iterator[str]:
    yield from (f"## {title}", "", "| flag | in megalite |", "|---|---|")
    docs = field_docs(topic)
    for field in config_fields():
        if field.group == topic:
            names = ", ".join((_code(*field.flags), *_values(field)))
            yield f"| {names} | {_first_sentence(docs[field.name])} |"
    for flag, text in CHECKED.get(topic, {}).items():
        yield f"| {_code(flag)} | checked: {text} |"
    for flag in CONVERTED.get(topic, ()):
        yield f"| {_code(flag)} | {_first_sentence(TOKEN_FLAGS[flag])}; converted to samples |"
    for flag, text in LATENT_ROTARY_FLAGS.items() if topic == "model" else ():
        off = f"without --multi-latent-attention, only `{OFF_WITHOUT_LATENTS[flag]}` is accepted"
        yield f"| {_code(flag)} | {text.rstrip('.')}; {off} |"
    for flag, text in FSDP_FLAGS.items() if topic == "parallel" else ():
        yield f"| {_code(flag)} | {text.rstrip('.')} |"
    for group in _groups("accepted", topic):
        yield f"| {_code(*sorted(group.flags))} | accepted, no effect: {group.why} |"
    for group in _groups("accepted_if_off", topic):
        values = " or ".join(f"`{value}`" for value in group.accepts)
        refused = f"else refused, {group.feature}: {group.fix}"
        yield f"| {_code(*sorted(group.flags))} | only {values}, {refused} |"
    for group in _groups("unsupported", topic):
        names = [*sorted(group.flags), *(f"{flag}*" for flag in sorted(group.prefixes))]
        alone = "no effect in a dense model, else " if group.of_experts else ""
        yield f"| {_code(*names)} | {alone}refused, {group.feature}: {group.fix} |"
    yield ""


def _groups(table: str, topic: str) -> list[FlagGroup]:
    return [group for group in flag_groups(table) if group.topic == topic]


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
