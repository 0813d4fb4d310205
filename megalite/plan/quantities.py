"""Write numbers and lengths of time for people."""

from __future__ import annotations

import math


def large(number: float) -> str:
    """Return a count in trillions, billions or millions, or in full below a million."""
    for unit, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= unit:
            return f"{plain(number / unit)} {name}"
    return f"{number:,.0f}"


def plain(number: float, digits: int = 4) -> str:
    """Return a number with at least `digits` significant digits and no exponent."""
    if number == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(number)))
    text = f"{number:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text


def duration(days: float, digits: int = 4) -> str:
    """Return a length of time in the largest unit that it contains at least once."""
    units = {"day": 1.0, "hour": 24.0, "minute": 1440.0, "second": 86400.0}
    name = next((name for name, unit in units.items() if days * unit >= 1), "second")
    text = plain(days * units[name], digits)
    return f"{text} {name}{'' if text == '1' else 's'}"
