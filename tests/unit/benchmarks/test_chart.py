"""Tables of RESULTS.md as they are read and drawn; tests/unit/docs holds the pictures to them."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from benchmarks.chart import COLOURS, LEFT, RESULTS, TITLES, Table, drawn, read_table

TEXT = """# Some

| | other |
|---|---|
| row | 9 |

<!-- chart: one -->
| | first | second |
|---|---|---|
| fast | 2.00 | - |
| slow, dropout 0.1 | 0.50 | 1 |

<!-- chart: empty -->
text
"""


def test_a_table_is_the_one_behind_its_mark() -> None:
    table = read_table("one", TEXT)
    assert table == Table(["first", "second"], [("fast", [2.0, None]), ("slow, dropout 0.1", [0.5, 1.0])])
    for name in ("empty", "none"):
        with pytest.raises(ValueError, match=f"<!-- chart: {name} -->"):
            read_table(name, TEXT)


def test_bars_are_as_long_as_their_numbers() -> None:
    picture = drawn("A title", read_table("one", TEXT))
    assert ElementTree.fromstring(picture).tag.endswith("svg")
    widths = [float(width) for width in re.findall(rf'<rect x="{LEFT}" y="[\d.]+" width="([\d.]+)"', picture)]
    bars = [width for width in widths if width > 12]  # the legend's boxes are small
    assert [round(width / bars[0], 3) for width in bars] == [1.0, 0.25, 0.5]
    assert [
        word for word in ("2.00", "0.50", "1.00", "first", "slow, dropout 0.1") if word not in picture
    ] == []


@pytest.mark.parametrize("name", TITLES)
def test_results_have_the_tables(name: str) -> None:
    table = read_table(name, RESULTS.read_text(encoding="utf-8"))
    assert 1 <= len(table.columns) <= len(COLOURS)
    assert table.rows and all(len(cells) == len(table.columns) for _, cells in table.rows)
    assert all(any(cell is not None for cell in cells) for _, cells in table.rows)
