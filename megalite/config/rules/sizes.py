"""Rules between two numbers: one must not be above the other, or must be divisible by it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from megalite.config.config import Config
from megalite.config.fields import config_fields, value_of, without_effect
from megalite.config.model.model_config import round_up
from megalite.config.option import flag_of, flag_with_value
from megalite.utils.errors import Problem


class Bound(NamedTuple):
    """Field whose value must not be above another field's.

    Attributes:
        name, most: the two fields; None in either of them is no bound.
        fix: what to pass instead; it may contain {value} and {most}.
        is_strict: the value must be below the other.
        unless: a field that replaces `name` or `most` if it is set.
    """

    name: str
    most: str
    fix: str = ": pass at most {most}"
    is_strict: bool = False
    unless: str = ""


_PEAK = ", the peak: pass at most {most}"
BOUNDS = (
    Bound("num_kv_shared_layers", "num_layers", ": pass fewer", is_strict=True),
    Bound("recompute_num_layers", "num_layers", ": pass the layers of a group, or of a stage"),
    Bound("mtp_num_layers", "seq_length", ", the tokens of a sample: change one of them", is_strict=True),
    Bound(
        "seq_length",
        "max_position_embeddings",
        ": pass --max-position-embeddings {value}, or shorter samples",
    ),
    Bound("vocab_size", "pad_vocab_size_to", ": pass at least {value}, or remove it"),
    Bound("rope_low_freq_factor", "rope_high_freq_factor", ": change one of them", is_strict=True),
    Bound("yarn_beta_slow", "yarn_beta_fast", ": change one of them"),
    Bound("moe_router_topk", "num_experts"),
    Bound("moe_router_group_topk", "moe_router_num_groups"),
    Bound("min_lr", "lr", _PEAK),
    Bound("lr_warmup_init", "lr", _PEAK),
    Bound("lr_warmup_init", "decoupled_lr", _PEAK),
    Bound("decoupled_min_lr", "decoupled_lr", _PEAK),
    Bound("min_lr", "decoupled_lr", f"{_PEAK}, or pass --decoupled-min-lr", unless="decoupled_min_lr"),
    Bound("start_weight_decay", "end_weight_decay", ": change one of them"),
    Bound("min_loss_scale", "initial_loss_scale", ": change one of them"),
    *(
        bound
        for unit in ("iters", "samples")
        for bound in (
            Bound(f"lr_wsd_decay_{unit}", f"lr_decay_{unit}"),
            Bound(f"lr_wsd_decay_{unit}", f"train_{unit}", unless=f"lr_decay_{unit}"),
        )
    ),
    Bound(
        "profile_step_start", "profile_step_end", ", the last profiled iteration: pass less", is_strict=True
    ),
)
"""The largest values of fields that depend on other fields. A field without effect has no bound."""


def bounds(config: Config, world_size: int | None) -> Iterator[Problem]:
    """Check the largest values of fields that depend on other fields."""
    found = [bound for bound in BOUNDS if _is_broken(bound, config)]
    values = config.values() if found else {}
    unused = without_effect(config_fields(), values) if found else {}
    for name, most, fix, is_strict, unless in found:
        if unused.keys().isdisjoint((name, most)) and values.get(unless) is None:
            one, other = (flag_with_value(each, values[each]) for each in (name, most))
            fix = fix.format(value=values[name], most=values[most])
            yield Problem((name, most), f"{one} is {'not below' if is_strict else 'above'} {other}{fix}")


def _is_broken(bound: Bound, config: Config) -> bool:
    value, most = value_of(bound.name, config), value_of(bound.most, config)
    if value is None or most is None:
        return False
    return bool(value >= most if bound.is_strict else value > most)


def not_divisible(
    name: str, number: int, by: str, divisor: int, fix: str, fields: tuple[str, ...]
) -> Iterator[Problem]:
    """Yield the problem of a number that is not divisible by another.

    Args:
        name: field of the number.
        by: the divisor's flag.
        fix: what to pass; it may contain {divisors}, the nearest divisors of the number, and {multiple}, the
            next multiple of the divisor.
        fields: further fields that cause it.
    """
    if number % divisor:
        fix = fix.format(divisors=divisors_near(number, divisor), multiple=round_up(number, divisor))
        text = f"{flag_of(name)} {number} is not divisible by {by} {divisor}: {fix}"
        yield Problem((name, *fields), text)


def divisors_near(number: int, wanted: int) -> str:
    """Return the divisors of a number that are nearest to `wanted`, which does not divide it: `8 or 12`."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    divisors = sorted({*small, *(number // size for size in small)})
    below = [size for size in divisors if size < wanted][-1:]
    return " or ".join(map(str, below + [size for size in divisors if size > wanted][:1]))
