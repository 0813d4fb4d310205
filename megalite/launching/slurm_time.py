"""Lengths of time as Slurm reads and writes them."""

from __future__ import annotations

import re

from megalite.errors import UserError

_FORMS = (
    r"(?P<m>\d+)",
    r"(?P<m>\d+):(?P<s>\d+)",
    r"(?P<h>\d+):(?P<m>\d+):(?P<s>\d+)",
    r"(?P<d>\d+)-(?P<h>\d+)",
    r"(?P<d>\d+)-(?P<h>\d+):(?P<m>\d+)",
    r"(?P<d>\d+)-(?P<h>\d+):(?P<m>\d+):(?P<s>\d+)",
)
"""What `man sbatch` says of --time."""
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def seconds_of(text: str) -> int:
    """Seconds of a time limit, of which a plain number is minutes.

    Raises:
        UserError: Slurm would not read it, or it is none.
    """
    for form in _FORMS:
        if match := re.fullmatch(form, text):
            seconds = sum(_SECONDS[unit] * int(number) for unit, number in match.groupdict().items())
            if seconds:
                return seconds
    raise UserError(
        f"--time {text} is no time limit: give minutes, hours:minutes:seconds or days-hours:minutes:seconds, "
        "as in 90, 20:00:00 or 2-00:00:00"
    )


def slurm_limit(seconds: float) -> str:
    """Return a length of time as --time takes it, rounded up to whole minutes: 20:00:00 or 2-00:00:00."""
    minutes = -int(-seconds // 60)
    hours, days = minutes // 60 % 24, minutes // (60 * 24)
    clock = f"{hours:02d}:{minutes % 60:02d}:00"
    return f"{days}-{clock}" if days else clock


def in_words(seconds: float) -> str:
    """A length of time for people."""
    for unit, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.0f} seconds"
