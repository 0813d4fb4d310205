#!/usr/bin/env python
"""Draws a pipeline schedule in the terminal, with its bubble and its peak of microbatches in flight."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megalite.cli import run_main
from megalite.cli.tool import ToolParser, positive_int
from megalite.pipeline.draw import draw
from megalite.pipeline.schedule import SCHEDULES


def main(arguments: Sequence[str]) -> None:
    """Reads the flags and prints the drawing."""
    parser = ToolParser(description="Draws a schedule: F forward, B backward, dots waiting.")
    parser.add_argument("--schedule", choices=sorted(SCHEDULES), default="1f1b")
    parser.add_argument("--stages", type=positive_int, default=4, help="pipeline stages, one a rank")
    parser.add_argument("--microbatches", type=positive_int, default=8, help="microbatches of a step")
    flags = parser.parse_args(arguments)
    print(draw(flags.schedule, flags.stages, flags.microbatches))


if __name__ == "__main__":
    run_main(main, sys.argv[1:])
