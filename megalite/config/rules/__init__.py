"""Rules between fields of the config, and the message about a number that another one does not divide."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megalite.config.model.model_config import round_up
from megalite.config.option import flag_of
from megalite.utils.errors import Problem


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
