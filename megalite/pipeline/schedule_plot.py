"""Draw a schedule's timeline as a PNG picture: one colour per kind of action, one shade per chunk."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from megalite.pipeline.draw_schedule import lanes, timeline_of, title
from megalite.pipeline.schedules import SCHEDULES, ActionKind, ScheduleName
from megalite.pipeline.simulator import TimelineSlot
from megalite.utils.errors import UserError
from megalite.utils.files import write_output

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

Colour = tuple[int, int, int]

COLOURS: dict[ActionKind, Colour] = {
    ActionKind.FORWARD: (66, 119, 214),
    ActionKind.BACKWARD: (46, 158, 107),
    ActionKind.BACKWARD_INPUT: (29, 158, 150),
    ActionKind.BACKWARD_WEIGHT: (232, 156, 48),
}
_BACKGROUND, _WAITING, _INK = (255, 255, 255), (240, 240, 240), (30, 30, 30)
_UNIT, _ROW, _GAP, _MARGIN, _LINE = 26, 30, 6, 64, 26  # pixels
_TEXT, _SMALL = 15, 11
_LEAST_WIDTH = 900
_MAX_WIDTH = 16_000


def save_picture(
    path: Path, schedule: ScheduleName, num_ranks: int, num_microbatches: int, num_chunks: int | None = None
) -> None:
    """Draw a schedule into a PNG file, with a legend and the title of `draw`.

    Raises:
        UserError: Pillow is not installed, the picture would be too large, or it cannot be written.
    """
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        raise UserError("a picture needs a package that is not installed: pip install pillow") from None
    timeline = timeline_of(schedule, num_ranks, num_microbatches, num_chunks)
    num_chunks = SCHEDULES[schedule].stage_map(num_ranks, num_chunks).num_chunks
    chart_width = int(timeline.makespan) * _UNIT
    if chart_width > _MAX_WIDTH:
        raise UserError(
            f"--png {path} would be {chart_width} pixels wide, more than {_MAX_WIDTH}: "
            "draw fewer microbatches"
        )
    width = max(chart_width + 2 * _MARGIN, _LEAST_WIDTH)
    top = 3 * _LINE
    image = Image.new("RGB", (width, top + num_ranks * (_ROW + _GAP) + _LINE), _BACKGROUND)
    canvas = ImageDraw.Draw(image)
    heading, _, peaks = title(schedule, num_microbatches, num_chunks, timeline).partition(", at most")
    canvas.text((_MARGIN, 8), heading, _INK, font_size=_TEXT)
    canvas.text((_MARGIN, 8 + _LINE), f"at most{peaks}", _INK, font_size=_TEXT)
    for rank, slots in enumerate(timeline.slots):
        y = top + rank * (_ROW + _GAP)
        canvas.text((8, y + 8), f"rank {rank}", _INK, font_size=_SMALL)
        canvas.rectangle((_MARGIN, y, _MARGIN + chart_width - 1, y + _ROW), _WAITING)
        for slot, upper, height in lanes(slots):
            _cell(canvas, slot, y + int(upper * _ROW), int(height * _ROW), num_chunks)
    _legend(canvas, {slot.action.kind for row in timeline.slots for slot in row}, image.height - _LINE)
    content = io.BytesIO()
    image.save(content, "PNG")
    write_output(path, content.getvalue(), "--png")


def _cell(canvas: ImageDraw, slot: TimelineSlot, y: int, height: int, num_chunks: int) -> None:
    left, right = _MARGIN + int(slot.start * _UNIT), _MARGIN + int(slot.end * _UNIT) - 1
    colour = shade(COLOURS[slot.action.kind], slot.action.chunk, num_chunks)
    canvas.rectangle((left, y, right, y + height), colour, outline=_BACKGROUND)
    bright = sum(colour) > 3 * 150
    middle = ((left + right) // 2, y + height // 2)
    ink = _INK if bright else _BACKGROUND
    canvas.text(middle, str(slot.action.microbatch), ink, anchor="mm", font_size=_SMALL)


def shade(colour: Colour, chunk: int, num_chunks: int) -> Colour:
    """Return the colour of a chunk: the first chunk has the full colour, the last chunk the lightest."""
    light = 0.6 * chunk / max(num_chunks - 1, 1)
    red, green, blue = (round(part + (255 - part) * light) for part in colour)
    return red, green, blue


def _legend(canvas: ImageDraw, kinds: set[ActionKind], y: int) -> None:
    x = _MARGIN
    for kind in (kind for kind in ActionKind if kind in kinds):
        canvas.rectangle((x, y + 4, x + 14, y + 18), COLOURS[kind])
        canvas.text((x + 20, y + 5), kind.value, _INK, font_size=_SMALL)
        x += 150
    canvas.text((x, y + 5), "grey: waiting; lighter: later chunk", _INK, font_size=_SMALL)
