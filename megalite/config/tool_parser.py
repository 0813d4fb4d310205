"""The command line of a tool: argparse, with errors as `UserError`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NoReturn

from megalite.commands import with_command_names
from megalite.config.command_line import known_flags
from megalite.config.fields import nearest, normalised
from megalite.errors import ConfigError, UserError
from megalite.files import url_problem


class ToolParser(argparse.ArgumentParser):
    """Parse arguments, with errors as `UserError`; flags cannot be abbreviated.

    Args:
        rest: flags, besides those of training, that the tool passes on to another parser.
    """

    def __init__(self, rest: Collection[str] = (), **settings: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        self._rest = frozenset(rest)
        super().__init__(formatter_class=formatter, allow_abbrev=False, **settings)

    @property
    def flags(self) -> frozenset[str]:
        """Return the flags that this parser knows itself."""
        return frozenset(self._option_string_actions)

    def parse_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """Parse a command line of the tool's own flags."""
        tokens = sys.argv[1:] if args is None else list(args)
        self._reject_unknown(tokens, ())
        return super().parse_args(tokens, namespace)

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """Parse the tool's own flags, and return the rest, which are flags of training."""
        tokens = sys.argv[1:] if args is None else list(args)
        self._reject_unknown(tokens, {*known_flags(), *self._rest})
        return super().parse_known_args(tokens, namespace)

    def _reject_unknown(self, tokens: list[str], others: Collection[str]) -> None:
        """Reject unknown flags whose nearest known flag is one of this parser's.

        Without this, argparse would report a missing required flag instead. An unknown flag that is nearer to
        one of the others is left to the parser of those, which reports all errors at once.
        """
        if "--" in tokens:
            tokens = tokens[: tokens.index("--")]  # only values follow
        own, problems = self.flags, []
        for token in tokens:
            name = token.partition("=")[0]
            is_value = not token.startswith("--") or " " in token  # as in argparse
            if is_value or name in own or normalised(name) in others:
                continue
            guess = nearest(name, [*own, *others])
            if guess in own:
                problems.append(f"unknown flag {name}; nearest is {guess} (see --help)")
            elif not others:
                problems.append(f"unknown flag {name} (see --help)")
        if problems:
            raise ConfigError(problems)

    def format_help(self) -> str:
        """Return the text of --help, with commands named as the user types them."""
        return with_command_names(super().format_help())

    def error(self, message: str) -> NoReturn:
        """Raise the error that argparse would print before it exits."""
        raise UserError(f"{message} (see --help)")


def positive_int(text: str) -> int:
    """Return a whole number above 0, as the `type` of an argument."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def whole_number(text: str) -> int:
    """Return a whole number, 0 included, as the `type` of an argument."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def local_path(text: str) -> Path:
    """Return a path of this machine, not a URL, as the `type` of an argument."""
    if problem := url_problem(text):
        raise argparse.ArgumentTypeError(problem)
    return Path(text)


def positive_number(text: str) -> float:
    """Return a finite number above 0, as the `type` of an argument."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value
