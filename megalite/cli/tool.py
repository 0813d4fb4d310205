"""The command line of a small tool: argparse, with a mistake as one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NoReturn

from megalite.cli.fields import normalised
from megalite.cli.hints import nearest
from megalite.cli.parse import known_flags
from megalite.errors import ConfigError, UserError


class ToolParser(argparse.ArgumentParser):
    """An argument parser whose mistakes are `UserError`; flags are not abbreviated.

    Args:
        rest: flags, besides those of training, that the tool passes on to another parser.
    """

    def __init__(self, rest: Collection[str] = (), **settings: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        self._rest = frozenset(rest)
        super().__init__(formatter_class=formatter, allow_abbrev=False, **settings)

    @property
    def flags(self) -> frozenset[str]:
        """The flags that this parser knows by itself."""
        return frozenset(self._option_string_actions)

    def parse_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """Parse flags of which this parser knows all."""
        words = sys.argv[1:] if args is None else list(args)
        self._refuse_unknown(words, ())
        return super().parse_args(words, namespace)

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """Parse the tool's own flags, and return the rest, which are flags of training."""
        words = sys.argv[1:] if args is None else list(args)
        self._refuse_unknown(words, {*known_flags(), *self._rest})
        return super().parse_known_args(words, namespace)

    def _refuse_unknown(self, words: list[str], others: Collection[str]) -> None:
        """Refuse unknown flags whose nearest known flag is one of this parser's.

        argparse would name a required flag that is missing instead. An unknown flag that is nearer to one of
        the others is left to whatever reads those: it reports all mistakes at once.
        """
        if "--" in words:  # what follows are values
            words = words[: words.index("--")]
        own, problems = self.flags, []
        for word in words:
            name = word.partition("=")[0]
            is_value = not word.startswith("--") or " " in word  # as argparse has it
            if is_value or name in own or normalised(name) in others:
                continue
            guess = nearest(name, [*own, *others])
            if guess in own:
                problems.append(f"unknown flag {name}; nearest is {guess} (see --help)")
        if problems:
            raise ConfigError(problems)

    def error(self, message: str) -> NoReturn:
        """Raises what argparse would print and exit by."""
        raise UserError(f"{message} (see --help)")


def positive_int(text: str) -> int:
    """The type of a flag that counts something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def whole_number(text: str) -> int:
    """The type of a flag that counts something that may be none."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(text)


def local_path(text: str) -> Path:
    """Return a flag's folder or file of this machine, as an argument parser's type: no URL."""
    if "://" in text:
        raise argparse.ArgumentTypeError(
            f"{text!r} is a URL: give a path of this machine or of a mounted file system"
        )
    return Path(text)


def positive_number(text: str) -> float:
    """The type of a flag that measures something."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value
