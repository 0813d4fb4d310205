"""One mistake in a config."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from megalite.config.config import Config

Rule = Callable[[Config, int | None], Iterator["Problem"]]
"""Yields what is wrong with a config when this many ranks are started (None: not known)."""


class Problem(NamedTuple):
    """A mistake, and the fields that make it up.

    A rule between fields says nothing worth reading once one of them is known to be wrong by itself:
    the fields tell which problems to leave out then.
    """

    fields: tuple[str, ...]
    text: str


def one_line(text: str) -> str:
    """The text with whatever would break a line of output, as a user's words may, in escaped form."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
