"""The versions of torch that megalite was tested with.

Setting Python's standard library alone: scripts read it where there is no torch yet.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

TESTED = ("2.11.0", "2.12.0", "2.13.0", "2.14.1", "2.15.0")
"""The core tests passed with these, oldest first. pip refuses a torch that is older than the first."""

PYTHONS = range(10, 14)
"""Minor versions of Python 3."""

WITHOUT = {"2.15.0": (10,)}
"""Versions of torch that are not published for each of `PYTHONS`, with those that they lack."""


def minor_of(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version such as ``2.15.0a0+git1f3c``; zeros where there are none."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def is_too_old(version: str) -> bool:
    """Return whether a torch of this version is older than each tested one."""
    return minor_of(version) < minor_of(TESTED[0])


def untested_warning(version: str) -> str | None:
    """Return a warning about a torch that is newer than each tested one; None for the others."""
    if minor_of(version) <= minor_of(TESTED[-1]):
        return None
    return (
        f"torch {version} is newer than {TESTED[-1]}, the newest that megalite was tested with: if it fails "
        "with an error of torch's, install that one"
    )


def supported_pairs() -> Iterator[tuple[int, str]]:
    """Yield the minor version of each Python with each torch that is published for it."""
    return ((minor, torch) for torch in TESTED for minor in PYTHONS if minor not in WITHOUT.get(torch, ()))
