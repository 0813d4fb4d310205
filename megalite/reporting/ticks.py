"""Axes: their range, their ticks, and numbers as people read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

_STEPS = (1.0, 2.0, 5.0, 10.0)
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Axis:
    """A range of values on a range of pixels.

    Attributes:
        low, high: values at its ends; above 0 where it is logarithmic.
        start, end: pixels at its ends.
    """

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def place(self, value: float) -> float:
        """The value's pixel; one outside of the range has one outside of the axis."""
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, wanted: int) -> list[float]:
        """About so many round values."""
        return (log_ticks if self.is_log else linear_ticks)(self.low, self.high, wanted)


def linear_ticks(low: float, high: float, wanted: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten that lie in the range."""
    step = _step(low, high, wanted)
    first = math.ceil(low / step - 1e-9)
    # Products of whole numbers, so that no error adds up; 0.0 takes the sign off -0.0.
    count = math.floor(high / step + 1e-9) - first + 1
    return [
        round((first + number) * step, 15 - math.floor(math.log10(step))) + 0.0 for number in range(count)
    ]


def log_ticks(low: float, high: float, wanted: int) -> list[float]:
    """Powers of ten, their multiples where there are few, and every so many of them where there are many."""
    decades = math.log10(high / low)
    if decades < 1:
        return [tick for tick in linear_ticks(low, high, wanted) if tick > 0]
    exponents = range(math.floor(math.log10(low) - 1e-9), math.ceil(math.log10(high) + 1e-9) + 1)
    factors: Sequence[int] = (
        (1, 2, 5) if 3 * decades <= wanted + 2 else (1, 3) if decades * 2 <= wanted else (1,)
    )
    stride = max(1, math.ceil(decades / wanted))
    values = (factor * 10.0**power for power in exponents if power % stride == 0 for factor in factors)
    return [value for value in values if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]


def padded(low: float, high: float, share: float = 0.04) -> tuple[float, float]:
    """A range with some room around it; one of no length gets some."""
    if low == high:
        room = abs(low) * 0.1 or 1.0
        return low - room, high + room
    room = (high - low) * share
    return low - room, high + room


def padded_log(low: float, high: float, share: float = 0.04) -> tuple[float, float]:
    """The same by ratio; both are above 0."""
    if low == high:
        return low / 1.2, high * 1.2
    ratio = (high / low) ** share
    return low / ratio, high * ratio


def label(value: float) -> str:
    """A number by itself, to four digits."""
    return _text(value, _unit(abs(value)), None)


def labels(ticks: Sequence[float]) -> list[str]:
    """Texts of an axis' ticks: of an even scale all in one unit, with as many digits as tell them apart."""
    gaps = [after - before for before, after in pairwise(ticks)]
    if not gaps or max(gaps) > 1.5 * min(gaps):
        return [label(tick) for tick in ticks]
    unit = _unit(max(map(abs, ticks)))
    return [_text(tick, unit, gaps[0]) for tick in ticks]


def _unit(size: float) -> tuple[float, str]:
    """What a number of this size is told in: thousands only where it has five digits."""
    if 0 < size < 1e-2:
        return 0.0, ""
    return next(((unit, name) for unit, name in _PREFIXES if size >= max(unit, 1e4)), (1.0, ""))


def _text(value: float, unit: tuple[float, str], step: float | None) -> str:
    size, suffix = unit
    if value == 0:
        return "0"
    if size == 0.0:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    if step is None:
        return f"{value / size:.4g}{suffix}"
    digits = max(0, -math.floor(math.log10(step / size) + 1e-9))
    return f"{value / size:.{digits}f}{suffix}"


def _step(low: float, high: float, wanted: int) -> float:
    rough = (high - low) / max(wanted, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in _STEPS if power * factor >= rough * (1 - 1e-9))
