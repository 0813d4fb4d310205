"""Draw a pipeline schedule in the terminal, with its bubble and its peak of microbatches in flight."""

from __future__ import annotations

from collections.abc import Sequence

from megalite.frontends.tool_parser import ToolParser, local_path, positive_int
from megalite.pipeline.draw_schedule import draw
from megalite.pipeline.schedule_plot import save_picture
from megalite.pipeline.schedule_svg import save_svg
from megalite.pipeline.schedules import SCHEDULES, ScheduleName
from megalite.utils.errors import UserError


def main(arguments: Sequence[str]) -> None:
    """Print the drawing, and write the requested pictures."""
    parser = ToolParser(
        description="Draw a schedule: F is forward, B backward (only input gradients if there is a W), "
        "W weight gradients, dots are idle time; a letter after a number is the chunk."
    )
    parser.add_argument("--schedule", choices=sorted(SCHEDULES), default="1f1b")
    parser.add_argument("--stages", type=positive_int, default=4, help="pipeline ranks")
    parser.add_argument("--microbatches", type=positive_int, default=8, help="microbatches per iteration")
    parser.add_argument(
        "--chunks", type=positive_int, help="chunks per rank of the interleaved schedule (default 2)"
    )
    parser.add_argument("--png", type=local_path, help="also draw a picture to this PNG file")
    parser.add_argument("--svg", type=local_path, help="also draw an SVG file, which needs no package")
    flags = parser.parse_args(arguments)
    sizes = flags.schedule, flags.stages, flags.microbatches, _num_chunks(flags.schedule, flags.chunks)
    print(draw(*sizes))
    if flags.png:
        save_picture(flags.png, *sizes)
    if flags.svg:
        save_svg(flags.svg, *sizes)


def _num_chunks(schedule: ScheduleName, requested: int | None) -> int | None:
    """Check that the schedule allows this number of chunks."""
    fixed = SCHEDULES[schedule].num_chunks
    if requested is None or requested == fixed or (fixed is None and requested > 1):
        return requested
    allowed = "two chunks or more" if fixed is None else f"{fixed} on each rank: remove --chunks"
    raise UserError(f"--chunks {requested} with --schedule {schedule}, which has {allowed}")
