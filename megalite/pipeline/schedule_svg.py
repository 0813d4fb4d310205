"""Draw a schedule's timeline as an SVG file, which needs no package to write."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from megalite.pipeline.draw_schedule import lanes, timeline_of, title
from megalite.pipeline.schedule_plot import COLOURS, Colour, shade
from megalite.pipeline.schedules import SCHEDULES, ScheduleName
from megalite.pipeline.simulator import TimelineSlot
from megalite.utils.files import write_output

INK, PAPER, WAITING = (30, 30, 30), (255, 255, 255), (235, 235, 235)
_UNIT, _ROW, _GAP, _MARGIN, _LINE = 18, 24, 4, 56, 22  # pixels
_LEAST_WIDTH = 640


class Drawing:
    """Boxes, text, lines and arrows on a white background, in pixels from the upper left corner."""

    def __init__(self, width: float, height: float) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" font-family="Helvetica, Arial, sans-serif">'
        ]
        self.box(0, 0, width, height, PAPER)

    def box(
        self, x: float, y: float, width: float, height: float, fill: Colour, line: Colour | None = None
    ) -> None:
        """Add a filled rectangle, with a thin border if `line` is set."""
        around = f' stroke="{_hex(line)}"' if line else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{_hex(fill)}"{around}/>'
        )

    def text(
        self, x: float, y: float, text: str, size: float = 12, ink: Colour = INK, anchor: str = "start"
    ) -> None:
        """Add a line of text whose baseline is at y; `anchor` is start, middle or end."""
        align = f' text-anchor="{anchor}"' if anchor != "start" else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{_hex(ink)}"{align}>{escape(text)}</text>'
        )

    def line(self, points: Sequence[tuple[float, float]], ink: Colour = INK, width: float = 1) -> None:
        """Add a line through points."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{_hex(ink)}" stroke-width="{width:g}"/>'
        )

    def arrow(self, x: float, y: float, to_x: float, to_y: float, ink: Colour = INK) -> None:
        """Add a horizontal or vertical arrow."""
        back_x, back_y = 5 * _sign(to_x - x), 5 * _sign(to_y - y)
        head = (
            f"{to_x:g},{to_y:g} {to_x - back_x - back_y / 2:g},{to_y - back_y - back_x / 2:g} "
            f"{to_x - back_x + back_y / 2:g},{to_y - back_y + back_x / 2:g}"
        )
        self._parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{to_x - back_x:g}" y2="{to_y - back_y:g}" '
            f'stroke="{_hex(ink)}"/><polygon points="{head}" fill="{_hex(ink)}"/>'
        )

    def content(self) -> str:
        """Return the content of the file."""
        return "\n".join([*self._parts, "</svg>", ""])


def _hex(colour: Colour) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def schedule_svg(
    schedule: ScheduleName, num_ranks: int, num_microbatches: int, num_chunks: int | None = None
) -> str:
    """Return an SVG of a schedule, with the title of `draw` and a legend."""
    timeline = timeline_of(schedule, num_ranks, num_microbatches, num_chunks)
    num_chunks = SCHEDULES[schedule].stage_map(num_ranks, num_chunks).num_chunks
    chart_width = timeline.makespan * _UNIT
    top, height = 3 * _LINE, _ROW + _GAP
    drawing = Drawing(max(chart_width + 1.5 * _MARGIN, _LEAST_WIDTH), top + num_ranks * height + 1.5 * _LINE)
    heading, _, peaks = title(schedule, num_microbatches, num_chunks, timeline).partition(", at most")
    drawing.text(_MARGIN, _LINE, heading, 14)
    drawing.text(_MARGIN, 2 * _LINE, f"at most{peaks}", 12)
    for rank, slots in enumerate(timeline.slots):
        y = top + rank * height
        drawing.text(6, y + 16, f"rank {rank}", 11)
        drawing.box(_MARGIN, y, chart_width, _ROW, WAITING)
        for slot, upper, height_part in lanes(slots):
            _cell(drawing, slot, y + upper * _ROW, height_part * _ROW, num_chunks)
    kinds = {slot.action.kind for row in timeline.slots for slot in row}
    x, y = float(_MARGIN), top + num_ranks * height + 6
    for kind in (kind for kind in COLOURS if kind in kinds):
        drawing.box(x, y, 12, 12, COLOURS[kind])
        drawing.text(x + 17, y + 10, kind.value, 11)
        x += 30 + 6.5 * len(kind.value)
    later = "; lighter: later chunk" if num_chunks > 1 else ""
    drawing.text(x, y + 10, f"grey: waiting{later}", 11)
    return drawing.content()


def _cell(drawing: Drawing, slot: TimelineSlot, y: float, height: float, num_chunks: int) -> None:
    colour = shade(COLOURS[slot.action.kind], slot.action.chunk, num_chunks)
    left, width = _MARGIN + slot.start * _UNIT, (slot.end - slot.start) * _UNIT
    drawing.box(left, y, width, height, colour, PAPER)
    ink = INK if sum(colour) > 3 * 150 else PAPER
    drawing.text(left + width / 2, y + height / 2 + 4, str(slot.action.microbatch), 11, ink, "middle")


def save_svg(
    path: Path, schedule: ScheduleName, num_ranks: int, num_microbatches: int, num_chunks: int | None = None
) -> None:
    """Write `schedule_svg` to a file.

    Raises:
        UserError: it cannot be written.
    """
    write_output(path, schedule_svg(schedule, num_ranks, num_microbatches, num_chunks), "--svg")
