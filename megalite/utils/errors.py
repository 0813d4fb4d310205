"""Errors that the user can fix, as opposed to defects of megalite."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple


class UserError(ValueError):
    """Raised for a mistake in the user's input: the program prints it as one line and exits with status 1.

    The message names the fields or files at fault, their values, and the fix. Any other exception is a defect
    of megalite and keeps its traceback.

    Attributes:
        on_one_rank: other ranks may not have the error, so this rank reports it, whatever its number.
    """

    on_one_rank = False


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has no message."""
    return (str(error) or type(error).__name__).splitlines()[0]


def shortened(text: str, most: int = 40) -> str:
    """Return external text for use in a message, cut after `most` characters."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def few(names: Sequence[str], most: int = 3) -> str:
    """Return the first names in one line, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


class ConfigError(UserError):
    """Raised with all mistakes in one configuration, one line each.

    Attributes:
        problems: the mistakes, one message each.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[str, ...]]]:
        """Pickle the list of problems, not the joined message, since ranks send errors to each other."""
        return type(self), (self.problems,)


@contextmanager
def collected(problems: list[str]) -> Iterator[None]:
    """End the block at a `UserError` and append its lines, so that later blocks can report errors too."""
    try:
        yield
    except UserError as error:
        problems += str(error).splitlines()


class Problem(NamedTuple):
    """Mistake in a config, and the fields that cause it.

    A rule between several fields is not reported while one of those fields is itself invalid.
    """

    fields: tuple[str, ...]
    text: str


def check_call(
    function: Callable[..., Any], name: str, *arguments: str, keywords: Sequence[str] = ()
) -> None:
    """Check that a function of the user's program takes the arguments that megalite passes.

    Args:
        name: name of the function, for the message.
        arguments: names of the positional arguments.
        keywords: names of the keyword arguments.

    Raises:
        UserError: the function does not take them.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # a C function without a signature
        return
    try:
        signature.bind(*arguments, **dict.fromkeys(keywords))
    except TypeError as error:
        bare = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
        signature = signature.replace(parameters=bare, return_annotation=signature.empty)
        call = ", ".join((*arguments, *(f"{each}=…" for each in keywords)))
        raise UserError(f"{name}{signature} is called as {name}({call}): {error}") from None


def kind_of(value: object) -> str:
    """Describe a value for a message: ``None``, ``the class NAME`` or ``a NAME``."""
    if value is None:
        return "None"
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def one_line(text: str) -> str:
    """Escape every character that would break a line of output."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def counted(number: int, noun: str, plural: str = "s") -> str:
    """Return a number with its noun."""
    return f"{number} {noun}{'' if number == 1 else plural}"
