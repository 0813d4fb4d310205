"""The command line of a small tool: argparse, with a mistake as one line."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from megalite.errors import UserError


class ToolParser(argparse.ArgumentParser):
    """An argument parser whose mistakes are `UserError`; flags are not abbreviated."""

    def __init__(self, **settings: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(formatter_class=formatter, allow_abbrev=False, **settings)

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


def positive_number(text: str) -> float:
    """The type of a flag that measures something."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value
