"""The name that a user may have meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name most like this one: one that it abbreviates, else the one with most in common."""
    names = sorted(known)
    begins = [candidate for candidate in names if candidate.startswith(name)]
    return min(begins, key=len) if begins else get_close_matches(name, names, n=1, cutoff=0.0)[0]
