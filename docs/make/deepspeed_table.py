"""Generate the table of DeepSpeed's settings from the tables of the reader of its file."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.compatibility.deepspeed_settings import HANDLERS, LATER, SOFT
from megalite.config.compatibility.deepspeed_tables import FIELDS, NOT_NEEDED, OF_FP16, REFUSED, SCHEDULES
from megalite.config.flags import flag_of

BEGIN = "<!-- settings of DeepSpeed's file, made by python -m docs.make -->"

NOTES = {
    "data_types.grad_accum_dtype": "only `fp32`: gradients are summed in it",
    "optimizer.type": "only Adam, AdamW and FusedAdam; Adam with `adam_w_mode` false sets `--weight-decay` 0",
    "scheduler.type": f"only {', '.join(SCHEDULES)}; sets `--lr-decay-style` and `--lr-step-timing`",
}


def deepspeed_table() -> str:
    """Return a Markdown table of the settings of DeepSpeed's file, and what megalite does with them."""
    rows = sorted({**dict(_obeyed()), **dict(_others()), **NOTES}.items())
    return "\n".join(
        ("| setting | in megalite |", "|---|---|", *(f"| `{key}` | {text} |" for key, text in rows))
    )


def _obeyed() -> Iterator[tuple[str, str]]:
    for key, name in {**FIELDS, **OF_FP16}.items():
        yield key, f"sets `{flag_of(name)}`"
    for key, handler in HANDLERS.items():
        names = ", ".join(f"`{flag_of(name)}`" for name in handler.fields.split())
        yield key, f"sets {names}"
    for key, (name, _) in SOFT.items():
        yield key, f"sets `{flag_of(name)}`, unless a flag or the YAML file does"
    for key, (_, text) in LATER.items():
        yield key, text


def _others() -> Iterator[tuple[str, str]]:
    for key, why in NOT_NEEDED.items():
        yield key, f"no effect, logged: {why}"
    for key, fix in REFUSED.items():
        yield key, f"refused, unless it is off: {fix}"
