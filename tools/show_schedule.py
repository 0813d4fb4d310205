#!/usr/bin/env python
"""Draws a pipeline schedule in the terminal, with its bubble and its peak of microbatches in flight."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from megalite.cli import run_main
from megalite.errors import UserError
from megalite.pipeline.draw import draw
from megalite.pipeline.schedule import SCHEDULES


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def main(arguments: Sequence[str]) -> None:
    """Reads the flags and prints the drawing."""
    parser = _Parser(description="Draws a schedule: F forward, B backward, dots waiting.")
    parser.add_argument("--schedule", choices=sorted(SCHEDULES), default="1f1b")
    parser.add_argument("--stages", type=_count, default=4, help="pipeline stages, one a rank")
    parser.add_argument("--microbatches", type=_count, default=8, help="microbatches of a step")
    flags = parser.parse_args(arguments)
    print(draw(flags.schedule, flags.stages, flags.microbatches))


if __name__ == "__main__":
    run_main(main, sys.argv[1:])
