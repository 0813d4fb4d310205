"""A few cases, each a combination of many, with every pair of parts that one of many cases has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from megalite.observe.verify.layouts import Layout
from megalite.utils.errors import ConfigError
from tests.covering import pairs
from tests.fake_cuda.cases import Case, case

ALWAYS = {
    **{"params_dtype": "bf16", "zero_stage": 0, "recompute_granularity": None, "clip_grad": 1.0},
    **{"attention_backend": "auto", "fp8_format": None},
}
"""Options whose default is a part, too: another value replaces much of the code that runs by default."""


def parts(row: Case) -> dict[str, Any]:
    """Return what a case is made of: the model, the pipeline, what the layout and the options set."""
    named = {**ALWAYS, **row.layout.parts, **row.options}
    if "pp" in named:
        named["pp"] = [named.pop(name, None) for name in ("pp", "v", "schedule")]
    named.pop("num_layers", None)
    return {"preset": row.preset, **named}


def adds_part(rows: Sequence[Case]) -> list[bool]:
    """Return for each row whether it has a part that no earlier row has."""
    known = set[tuple[str, str]]()
    found = []
    for row in rows:
        own = {(name, str(value)) for name, value in parts(row).items()}
        found.append(not own <= known)
        known |= own
    return found


def covering_rows(cases: Sequence[Case]) -> Iterator[Case]:
    """Yield cases that together have every pair of parts that a given case has.

    Each row begins with the case that has most pairs that no earlier row has. The others, in the same order,
    are merged into it if the row then has more such pairs, keeps its parts and has no more pipeline ranks,
    each of which would run what the others run.
    """
    pairs_of = [pairs(parts(each)) for each in cases]
    missing = set().union(*pairs_of)
    while missing:
        num_new = [len(each & missing) for each in pairs_of]
        first, *others = sorted(range(len(cases)), key=lambda number: -num_new[number])
        row = cases[first]
        missing -= pairs_of[first]
        for number in others:
            merged = _merged(row, cases[number])
            new = pairs(parts(merged)) & missing
            keeps_parts = parts(row).items() <= parts(merged).items()
            if new and keeps_parts and len(merged.ranks) == len(row.ranks) and _is_possible(merged):
                row = merged
                missing -= new
        yield row


def _merged(one: Case, other: Case) -> Case:
    """Return a case with the parts of two; where they differ, with those of the second."""
    merged = {**one.layout.parts, **other.layout.parts}
    sizes = {name: merged.pop(name) for name in {**one.layout.sizes, **other.layout.sizes}}
    numbers = {name: merged.pop(name) for name in ("shard", "mbs", "v", "schedule") if name in merged}
    layout = Layout(sizes, **numbers, switches=tuple(merged.values()))
    return case(layout, other.preset, **{**one.options, **other.options})


def _is_possible(row: Case) -> bool:
    """Return whether a case has a config, and its layout overrides none of its options."""
    try:
        config = row.config()
    except ConfigError:
        return False
    groups = [getattr(config, each.name) for each in fields(config)]
    return all(
        value in [getattr(group, name) for group in groups if hasattr(group, name)]
        for name, value in row.options.items()
        if name != "num_layers"
    )
