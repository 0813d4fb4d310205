"""Draw a schedule's timeline: one row per rank, time to the right.

As text; as an SVG file, which needs no package; or as a PNG picture, which needs Pillow.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import ascii_lowercase
from typing import TypeVar
from xml.sax.saxutils import escape

from megalite.pipeline.schedules import SCHEDULES, Action, ActionKind, ScheduleName
from megalite.pipeline.simulator import Timeline, TimelineSlot, simulate_schedule
from megalite.utils.errors import UserError
from megalite.utils.files import write_output

Colour = tuple[int, int, int]
D = TypeVar("D", "Drawing", "PngDrawing")

LETTERS = {
    ActionKind.FORWARD: "F",
    ActionKind.BACKWARD: "B",
    ActionKind.BACKWARD_INPUT: "B",
    ActionKind.BACKWARD_WEIGHT: "W",
}
FILLS = {
    ActionKind.FORWARD: " ",
    ActionKind.BACKWARD: "=",
    ActionKind.BACKWARD_INPUT: " ",
    ActionKind.BACKWARD_WEIGHT: " ",
}


def unit_timeline(
    schedule: ScheduleName, num_ranks: int, num_microbatches: int, num_chunks: int | None
) -> Timeline:
    """Return the timeline to draw: a forward takes one unit, a backward two, or one for each part."""
    return simulate_schedule(
        schedule, num_ranks, num_microbatches, num_chunks, lambda rank, action: action.kind.units
    )


def draw(schedule: ScheduleName, num_ranks: int, num_microbatches: int, num_chunks: int | None = None) -> str:
    """Draw a schedule under a title with its bubble and its peak of microbatches in flight.

    The letter after a microbatch's number is the chunk; dots are idle time.
    """
    timeline = unit_timeline(schedule, num_ranks, num_microbatches, num_chunks)
    num_chunks = SCHEDULES[schedule].stage_map(num_ranks, num_chunks).num_chunks
    unit = max(len(_label(slot.action, num_chunks)) for row in timeline.slots for slot in row)
    margin = len(str(num_ranks - 1))
    width = int(timeline.makespan) * unit
    rows = [
        f"rank {rank:{margin}} |{_row(slots, unit, num_chunks).ljust(width, '.')}|"
        for rank, slots in enumerate(timeline.slots)
    ]
    return "\n".join([title(schedule, num_microbatches, num_chunks, timeline), *rows])


def title(schedule: ScheduleName, num_microbatches: int, num_chunks: int, timeline: Timeline) -> str:
    """Return the title of a drawing: schedule, sizes, bubble and microbatches in flight."""
    peaks = timeline.peaks_in_flight
    ranks, held = f"{len(peaks)} stages", "microbatches"
    if num_chunks > 1:
        ranks, held = f"{len(peaks)} ranks of {num_chunks} chunks", "microbatches of a chunk"
    return (
        f"{schedule}: {ranks}, {num_microbatches} microbatches, "
        f"bubble {timeline.bubble_fraction:.1%} of the time, "
        f"at most {max(peaks)} {held} in flight (by rank: {' '.join(map(str, peaks))})"
    )


def _row(slots: Sequence[TimelineSlot], unit: int, num_chunks: int) -> str:
    row = ""
    for slot in slots:
        cell = _label(slot.action, num_chunks)
        row = row.ljust(int(slot.start) * unit, ".") + cell.ljust(
            slot.action.kind.units * unit, FILLS[slot.action.kind]
        )
    return row


def _label(action: Action, num_chunks: int) -> str:
    chunk = ascii_lowercase[action.chunk % len(ascii_lowercase)] if num_chunks > 1 else ""
    return f"{LETTERS[action.kind]}{action.microbatch}{chunk}"


COLOURS: dict[ActionKind, Colour] = {
    ActionKind.FORWARD: (66, 119, 214),
    ActionKind.BACKWARD: (46, 158, 107),
    ActionKind.BACKWARD_INPUT: (29, 158, 150),
    ActionKind.BACKWARD_WEIGHT: (232, 156, 48),
}
INK, PAPER, WAITING = (30, 30, 30), (255, 255, 255), (235, 235, 235)
_UNIT, _ROW, _GAP, _MARGIN, _LINE = 18, 24, 4, 56, 22  # pixels
_LEAST_WIDTH = 640
_PNG_SCALE = 1.5
_MAX_PNG_WIDTH = 16_000


class Drawing:
    """Boxes, text and lines on a white background, in pixels from the upper left corner."""

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
        back_x, back_y = (5 * ((end > start) - (end < start)) for start, end in ((x, to_x), (y, to_y)))
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


class PngDrawing:
    """Boxes and text as in `Drawing`, in a PNG picture of 1.5 times the size.

    Raises:
        UserError: Pillow is not installed, or the picture would be too large.
    """

    def __init__(self, width: float, height: float) -> None:
        try:
            from PIL import Image, ImageDraw
        except ImportError:
            raise UserError("a picture needs a package that is not installed: pip install pillow") from None
        size = round(width * _PNG_SCALE), round(height * _PNG_SCALE)
        if size[0] > _MAX_PNG_WIDTH:
            raise UserError(
                f"--png would be {size[0]} pixels wide, more than {_MAX_PNG_WIDTH}: draw fewer microbatches"
            )
        self._image = Image.new("RGB", size, PAPER)
        self._canvas = ImageDraw.Draw(self._image)

    def box(
        self, x: float, y: float, width: float, height: float, fill: Colour, line: Colour | None = None
    ) -> None:
        """Add a filled rectangle, with a thin border if `line` is set."""
        corners = [round(each * _PNG_SCALE) for each in (x, y, x + width, y + height)]
        self._canvas.rectangle(tuple(corners), fill, outline=line)

    def text(
        self, x: float, y: float, text: str, size: float = 12, ink: Colour = INK, anchor: str = "start"
    ) -> None:
        """Add a line of text whose baseline is at y; `anchor` is start, middle or end."""
        place = x * _PNG_SCALE, y * _PNG_SCALE
        side = {"start": "l", "middle": "m", "end": "r"}[anchor]
        self._canvas.text(place, text, ink, anchor=f"{side}s", font_size=size * _PNG_SCALE)

    def content(self) -> bytes:
        """Return the content of the file."""
        content = io.BytesIO()
        self._image.save(content, "PNG")
        return content.getvalue()


def shade(colour: Colour, chunk: int, num_chunks: int) -> Colour:
    """Return the colour of a chunk: the first chunk has the full colour, the last chunk the lightest."""
    light = 0.6 * chunk / max(num_chunks - 1, 1)
    red, green, blue = (round(part + (255 - part) * light) for part in colour)
    return red, green, blue


def save_picture(
    path: Path, schedule: ScheduleName, num_ranks: int, num_microbatches: int, num_chunks: int | None = None
) -> None:
    """Draw a schedule into a PNG file.

    Raises:
        UserError: Pillow is not installed, the picture would be too large, or it cannot be written.
    """
    drawing = _drawn(PngDrawing, schedule, num_ranks, num_microbatches, num_chunks)
    write_output(path, drawing.content(), "--png")


def save_svg(
    path: Path, schedule: ScheduleName, num_ranks: int, num_microbatches: int, num_chunks: int | None = None
) -> None:
    """Write `schedule_svg` to a file.

    Raises:
        UserError: it cannot be written.
    """
    write_output(path, schedule_svg(schedule, num_ranks, num_microbatches, num_chunks), "--svg")


def schedule_svg(
    schedule: ScheduleName, num_ranks: int, num_microbatches: int, num_chunks: int | None = None
) -> str:
    """Return an SVG of a schedule."""
    return _drawn(Drawing, schedule, num_ranks, num_microbatches, num_chunks).content()


def _drawn(
    kind: type[D], schedule: ScheduleName, num_ranks: int, num_microbatches: int, num_chunks: int | None
) -> D:
    """Draw a schedule with the title of `draw` and a legend."""
    timeline = unit_timeline(schedule, num_ranks, num_microbatches, num_chunks)
    num_chunks = SCHEDULES[schedule].stage_map(num_ranks, num_chunks).num_chunks
    chart_width = timeline.makespan * _UNIT
    top, height = 3 * _LINE, _ROW + _GAP
    drawing = kind(max(chart_width + 1.5 * _MARGIN, _LEAST_WIDTH), top + num_ranks * height + 1.5 * _LINE)
    heading, _, peaks = title(schedule, num_microbatches, num_chunks, timeline).partition(", at most")
    drawing.text(_MARGIN, _LINE, heading, 14)
    drawing.text(_MARGIN, 2 * _LINE, f"at most{peaks}", 12)
    for rank, slots in enumerate(timeline.slots):
        y = top + rank * height
        drawing.text(6, y + 16, f"rank {rank}", 11)
        drawing.box(_MARGIN, y, chart_width, _ROW, WAITING)
        for slot, upper, lane_height in _lanes(slots):
            _draw_slot(drawing, slot, y + upper * _ROW, lane_height * _ROW, num_chunks)
    kinds = {slot.action.kind for row in timeline.slots for slot in row}
    x, y = float(_MARGIN), top + num_ranks * height + 6
    for action_kind in (each for each in COLOURS if each in kinds):
        drawing.box(x, y, 12, 12, COLOURS[action_kind])
        drawing.text(x + 17, y + 10, action_kind.value, 11)
        x += 30 + 6.5 * len(action_kind.value)
    later = "; lighter: later chunk" if num_chunks > 1 else ""
    drawing.text(x, y + 10, f"grey: waiting{later}", 11)
    return drawing


def _lanes(slots: Sequence[TimelineSlot]) -> Iterator[tuple[TimelineSlot, float, float]]:
    """Yield each slot with its top and height in the row, as parts of its height.

    Two actions that run together have a half each.
    """
    number_of = Counter(slot.span for slot in slots)
    seen = Counter[tuple[float, float]]()
    for slot in slots:
        yield slot, seen[slot.span] / number_of[slot.span], 1 / number_of[slot.span]
        seen[slot.span] += 1


def _draw_slot(
    drawing: Drawing | PngDrawing, slot: TimelineSlot, y: float, height: float, num_chunks: int
) -> None:
    colour = shade(COLOURS[slot.action.kind], slot.action.chunk, num_chunks)
    left, width = _MARGIN + slot.start * _UNIT, (slot.end - slot.start) * _UNIT
    drawing.box(left, y, width, height, colour, PAPER)
    ink = INK if sum(colour) > 3 * 150 else PAPER
    drawing.text(left + width / 2, y + height / 2 + 4, str(slot.action.microbatch), 11, ink, "middle")
