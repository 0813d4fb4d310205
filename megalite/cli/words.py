"""An argument list as flags, each with the words after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megalite.cli.fields import normalised


class Given(NamedTuple):
    """A flag of the command line.

    Attributes:
        name: as it was written.
        flag: as the tables know it, with dashes.
        words: the words up to the next flag.
    """

    name: str
    flag: str
    words: tuple[str, ...]


def split_words(argv: Sequence[str]) -> tuple[list[Given], list[str]]:
    """Splits an argument list before each flag; the second list is the words before the first one."""
    stray: list[str] = []
    given: list[Given] = []
    for word in argv:
        if _is_flag(word):
            name, equals, value = word.partition("=")
            given.append(Given(name, normalised(name), (value,) if equals else ()))
        elif given:
            last = given[-1]
            given[-1] = last._replace(words=(*last.words, word))
        else:
            stray.append(word)
    return given, stray


def _is_flag(word: str) -> bool:
    """Whether a word starts with a dash and is no negative number."""
    if not word.startswith("-") or word == "-":
        return False
    try:
        float(word)
    except ValueError:
        return True
    return False
