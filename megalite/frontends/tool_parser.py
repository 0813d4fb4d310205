"""A command-line parser for tools: argparse, but it reports all errors at once."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megalite.config.arguments import nearest
from megalite.config.fields import MAX_INT, normalised
from megalite.frontends.command_line import known_flags
from megalite.utils.commands import command_lines, with_command_names
from megalite.utils.errors import ConfigError, shortened
from megalite.utils.files import url_problem


class _HelpFormatter(argparse.HelpFormatter):
    """Wraps help texts to the terminal: commands between flags, other text between words."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = [part.splitlines() for part in re.split(r"\n\s*\n", inspect.cleandoc(text))]
        return "\n\n".join("\n".join(_filled(lines, width)) for lines in paragraphs)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


def _filled(lines: Sequence[str], width: int) -> list[str]:
    if not lines[0].startswith(("megalite ", "python ", "torchrun ")):
        return textwrap.wrap(" ".join(lines), width, break_on_hyphens=False)
    return [part for line in lines for part in command_lines(line, width)]


class ToolParser(argparse.ArgumentParser):
    """Parses arguments, and raises all errors at once as a `ConfigError`. Flags cannot be abbreviated.

    Args:
        rest: flags, besides the flags of training, that the tool passes on to another parser.
    """

    def __init__(self, rest: Collection[str] = (), **settings: Any) -> None:
        self._rest = frozenset(rest)
        self._problems: list[str] = []
        super().__init__(formatter_class=_HelpFormatter, allow_abbrev=False, **settings)
        self.register("type", int, _int)

    @property
    def flags(self) -> frozenset[str]:
        """Return the parser's own flags."""
        return frozenset(self._option_string_actions)

    def parse_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """Parse a command line of the tool's own flags."""
        found, problems = self.find_problems(args, namespace)
        if problems:
            raise ConfigError(problems)
        return found

    def find_problems(
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse a command line of the tool's own flags, and return its errors instead of raising them.

        Returns:
            The values of the flags, or defaults for invalid or missing flags; and a line for each error.
        """
        found = argparse.Namespace() if namespace is None else namespace
        try:
            _, rest = self._parse(args, found, ())
        except ConfigError as error:
            return found, list(error.problems)
        if rest and not self._problems:
            self._problems.append(f"unrecognized arguments: {' '.join(rest)} (see --help)")
        return found, self._problems

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """Parse the tool's own flags, and return the rest: flags of training."""
        parsed = self._parse(args, namespace, {*known_flags(), *self._rest})
        if self._problems:
            raise ConfigError(self._problems)
        return parsed

    def _parse(
        self, args: Iterable[str] | None, namespace: Any, others: Collection[str]
    ) -> tuple[argparse.Namespace, list[str]]:
        """Collect errors in `self._problems`; return the values and the rest of the command line."""
        tokens = sys.argv[1:] if args is None else list(args)
        self._problems = []
        return super().parse_known_args(self._corrected(tokens, others), namespace)

    def _corrected(self, tokens: list[str], others: Collection[str]) -> list[str]:
        """Report unknown flags, and replace each with this parser's nearest flag, so it is not missing too.

        An unknown flag that is nearer to a flag of the other parser is left to that parser, which reports all
        its errors at once.
        """
        own, corrected = self._option_string_actions, list(tokens)
        end = tokens.index("--") if "--" in tokens else len(tokens)  # only values follow
        for position, token in enumerate(tokens[:end]):
            name, equals, value = token.partition("=")
            is_value = not token.startswith("--") or " " in token  # as in argparse
            if is_value or normalised(name) in others:
                continue
            if name in own:
                if equals and own[name].nargs == 0:
                    self._problems.append(f"{name} takes no value, but got {value!r} (see --help)")
                    corrected[position] = name
                continue
            guess = nearest(name, [*own, *others])
            if guess in own:
                self._problems.append(f"unknown flag {name}; nearest is {guess} (see --help)")
                corrected[position] = f"{guess}{equals}{value}"
            elif not others:
                self._problems.append(f"unknown flag {name} (see --help)")
        if "--help" in corrected and "--help" not in tokens:  # nothing else was meant
            raise ConfigError(self._problems)
        return corrected

    def _match_argument(self, action: argparse.Action, arg_strings_pattern: str) -> int:
        """Return the number of values of a flag; report a wrong number, and continue with the next flag."""
        try:
            return super()._match_argument(action, arg_strings_pattern)
        except argparse.ArgumentError as error:
            self._problems.append(f"{error} (see --help)")
            return 0

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Return the value of a flag; report a wrong one, and continue with the default."""
        if action.nargs is None and not arg_strings:  # `_match_argument` has reported it
            return action.default
        try:
            return super()._get_values(action, arg_strings)
        except argparse.ArgumentError as error:
            self._problems.append(f"{error} (see --help)")
            return action.default

    def format_help(self) -> str:
        """Return the text of --help, with commands as the user types them."""
        return with_command_names(super().format_help())

    def error(self, message: str) -> NoReturn:
        """Raise the error that argparse would print before exiting, together with earlier errors."""
        raise ConfigError([*self._problems, f"{message} (see --help)"])


def _int(text: str) -> int:
    """Parse a whole number that fits in 64 bits; an argparse `type`."""
    value = int(text)
    if abs(value) > MAX_INT:
        raise argparse.ArgumentTypeError(f"{shortened(text)!r} is above 2**63 - 1")
    return value


def positive_int(text: str) -> int:
    """Parse a whole number above 0; an argparse `type`."""
    if not text.isdecimal() or _int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def whole_number(text: str) -> int:
    """Parse a whole number, 0 included; an argparse `type`."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return _int(text)


def local_path(text: str) -> Path:
    """Parse a path on this machine, not a URL; an argparse `type`."""
    if problem := url_problem(text):
        raise argparse.ArgumentTypeError(problem)
    return Path(text)


def positive_number(text: str) -> float:
    """Parse a finite number above 0; an argparse `type`."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


_DURATION_SECONDS = {"h": 3600.0, "d": 86400.0, "y": 365 * 86400.0}


def duration(text: str) -> float:
    """Parse a length of time above 0 in hours, days or years, as seconds; an argparse `type`."""
    seconds = _DURATION_SECONDS.get(text[-1:])
    if seconds is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} does not end in a unit: pass hours, days or years, such as 26000h, 1000d or 3y"
        )
    return positive_number(str(positive_number(text[:-1]) * seconds))
