#!/usr/bin/env python
"""Draw tables of RESULTS.md as bar charts, for the README and docs/performance.md.

python benchmarks/chart.py      writes docs/pictures/speed_of_*.svg, as `python -m docs.make` does with all

A table with `<!-- chart: NAME -->` before it is drawn. Its cells are ratios, above 1 if megalite is faster; a
cell that is not a number has no bar.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megalite.pipeline.draw_schedule import INK, Colour, Drawing

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
PICTURES = ROOT / "docs" / "pictures"
TITLES = {
    "step": "A training step of megalite: times as fast as its peers",
    "operators": "Operators of megalite: times as fast as eager PyTorch",
}
"""By the name in RESULTS.md; the picture is speed_of_NAME.svg."""
COLOURS: Sequence[Colour] = ((66, 119, 214), (46, 158, 107), (232, 156, 48), (140, 108, 200))
BAR, GAP, TOP = 12, 10, 64  # pixels
LEFT, WIDTH, RIGHT = 190, 470, 60


class Table(NamedTuple):
    """Numbers by row and column.

    Attributes:
        rows: a name and a cell for each column; None for a cell that is no number.
    """

    columns: list[str]
    rows: list[tuple[str, list[float | None]]]


def read_table(name: str, text: str) -> Table:
    """Return the table behind the mark of that name.

    Raises:
        ValueError: there is none.
    """
    found = re.search(rf"^<!-- chart: {re.escape(name)} -->\n+((?:\|.*\n)+)", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"RESULTS.md has no table behind <!-- chart: {name} -->")
    head, _, *body = ([cell.strip() for cell in line.strip("|").split("|")] for line in found[1].splitlines())
    return Table(head[1:], [(row[0], [_number(cell) for cell in row[1:]]) for row in body])


def _number(cell: str) -> float | None:
    return float(cell) if re.fullmatch(r"\d+(\.\d+)?", cell) else None


def drawn(title: str, table: Table) -> str:
    """Return the table as bars in groups, a group for each row; a line stands at 1."""
    heights = [BAR * sum(cell is not None for cell in cells) + GAP for _, cells in table.rows]
    largest = max(cell for _, cells in table.rows for cell in cells if cell is not None)
    scale = WIDTH / max(largest, 1.0)
    bottom = TOP + sum(heights)
    drawing = Drawing(LEFT + WIDTH + RIGHT, bottom + 30)
    drawing.text(16, 24, title, 14)
    x = float(LEFT)
    for name, colour in zip(table.columns, COLOURS, strict=False):
        drawing.box(x, 36, 12, 12, colour)
        drawing.text(x + 17, 46, name, 11)
        x += 36 + 6.2 * len(name)
    drawing.text(LEFT + scale, bottom + 16, "1: as fast", 11, anchor="middle")
    y = float(TOP)
    for (name, cells), height in zip(table.rows, heights, strict=True):
        drawing.text(LEFT - 10, y + (height - GAP) / 2 + 4, name, 12, anchor="end")
        for cell, colour in zip(cells, COLOURS, strict=False):
            if cell is not None:
                drawing.box(LEFT, y, cell * scale, BAR - 2, colour)
                drawing.text(LEFT + cell * scale + 5, y + BAR - 3, f"{cell:.2f}", 10)
                y += BAR
        y += GAP
    drawing.box(LEFT + scale, TOP - 6, 1, bottom - TOP + 6, INK)
    return drawing.content()


def speed_of(name: str) -> str:
    """Return the picture of a table, as RESULTS.md has it now.

    Args:
        name: one of TITLES.
    """
    return drawn(TITLES[name], read_table(name, RESULTS.read_text(encoding="utf-8")))


def main() -> None:
    """Write all of them."""
    for name in TITLES:
        picture = PICTURES / f"speed_of_{name}.svg"
        picture.write_text(speed_of(name), encoding="utf-8")
        print(f"wrote {picture.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
