#!/usr/bin/env python
"""Draws a pipeline schedule in the terminal, with its bubble and its peak of microbatches in flight."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megalite.cli import run_main
from megalite.cli.tool import ToolParser, local_path, positive_int
from megalite.errors import UserError
from megalite.pipeline.draw import draw
from megalite.pipeline.picture import save_picture
from megalite.pipeline.schedule import SCHEDULES
from megalite.pipeline.svg import save_svg


def main(arguments: Sequence[str]) -> None:
    """Reads the flags and prints the drawing."""
    parser = ToolParser(
        description="Draws a schedule: F forward, B backward (of the input alone where there is a W), "
        "W weights' gradients, dots waiting; the letter behind a number is the chunk."
    )
    parser.add_argument("--schedule", choices=sorted(SCHEDULES), default="1f1b")
    parser.add_argument("--stages", type=positive_int, default=4, help="pipeline ranks")
    parser.add_argument("--microbatches", type=positive_int, default=8, help="microbatches of a step")
    parser.add_argument("--chunks", type=positive_int, help="of the interleaved schedule, on each rank; or 2")
    parser.add_argument("--png", type=local_path, help="draw it into this file too, in colours")
    parser.add_argument(
        "--svg", type=local_path, help="the same as an SVG file, which needs no package to write"
    )
    flags = parser.parse_args(arguments)
    what = flags.schedule, flags.stages, flags.microbatches, _num_chunks(flags.schedule, flags.chunks)
    print(draw(*what))
    if flags.png:
        save_picture(flags.png, *what)
    if flags.svg:
        save_svg(flags.svg, *what)


def _num_chunks(schedule: str, given: int | None) -> int | None:
    """Refuses a number of chunks that the schedule does not have."""
    has = SCHEDULES[schedule].num_chunks
    if given is None or given == has or (has is None and given > 1):
        return given
    wanted = "two chunks or more" if has is None else f"{has} on each rank: leave --chunks out"
    raise UserError(f"--chunks {given} with --schedule {schedule}, which has {wanted}")


if __name__ == "__main__":
    run_main(main, sys.argv[1:])
