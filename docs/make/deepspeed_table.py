"""Generate the table of DeepSpeed's settings from the tables of the reader of its file."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.option import flag_of
from megalite.frontends.deepspeed.settings import tables

BEGIN = "<!-- settings of DeepSpeed's file, made by python -m docs.make -->"

NOTES = {
    "data_types.grad_accum_dtype": "only `fp32`: gradients are summed in it",
    "optimizer.type": "only Adam, AdamW and FusedAdam; Adam with `adam_w_mode` false sets `--weight-decay` 0",
}


def deepspeed_table() -> str:
    """Return a Markdown table of the settings of DeepSpeed's file, and what megalite does with them."""
    schedulers = ", ".join(tables()["schedules"])
    scheduler = f"only {schedulers}; sets `--lr-decay-style` and `--lr-step-timing`"
    rows = sorted({**dict(_obeyed()), **dict(_others()), **NOTES, "scheduler.type": scheduler}.items())
    return "\n".join(
        ("| setting | in megalite |", "|---|---|", *(f"| `{key}` | {text} |" for key, text in rows))
    )


def _obeyed() -> Iterator[tuple[str, str]]:
    by_value = {key: [*next(iter(values.values()))] for key, values in tables()["by_value"].items()}
    derived = {key: names for key, (_, *names) in tables()["derived"].items()}
    copied = {key: [name] for key, name in {**tables()["fields"], **tables()["fields_of_fp16"]}.items()}
    for key, names in {**copied, **by_value, **derived}.items():
        yield key, f"sets {', '.join(f'`{flag_of(name)}`' for name in names)}"
    for key, name in tables()["soft"].items():
        yield key, f"sets `{flag_of(name)}`, unless a flag or the YAML file does"
    for key, row in tables()["read_with_others"].items():
        yield key, row["effect"]
    for section in tables()["switched"]:
        if f"{section}.enabled" not in derived:
            yield f"{section}.enabled", "turns its section on"


def _others() -> Iterator[tuple[str, str]]:
    for key, why in tables()["not_needed"].items():
        yield key, f"no effect, logged: {why}"
    for key, fix in tables()["refused"].items():
        yield key, f"refused, unless it is off: {fix}"
