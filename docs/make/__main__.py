"""Update the generated parts of the documentation: command output, pictures and tables.

python -m docs.make                       every page of docs/, and every picture
python -m docs.make docs/PAGE.md …        these pages, and the pictures that they show

Run it from the repository root.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from docs.make.blocks import renewed
from docs.make.deepspeed_table import BEGIN as DEEPSPEED
from docs.make.deepspeed_table import deepspeed_table
from docs.make.flag_table import BEGIN, END, flag_table
from docs.make.pictures import PICTURES
from docs.make.roofline_figures import with_figures

DOCS = Path(__file__).parents[1]


def main(pages: Sequence[str]) -> None:
    """Rewrite the files that are out of date, and print their names."""
    chosen = [Path(page).resolve() for page in pages]
    shown = "".join(page.read_text(encoding="utf-8") for page in chosen)
    for name, draw in PICTURES.items():
        if not chosen or f"pictures/{name})" in shown:
            _write(DOCS / "pictures" / name, draw())
    for page in chosen or sorted(DOCS.rglob("*.md")):
        _write(page, with_figures(with_tables(renewed(page))))


def with_tables(text: str) -> str:
    """Return the text with its generated tables, if it has any, replaced by the current ones."""
    for mark, table in ((BEGIN, flag_table), (DEEPSPEED, deepspeed_table)):
        before, begin, rest = text.partition(mark)
        text = f"{before}{begin}\n{table()}\n{END}{rest.partition(END)[2]}" if begin else text
    return text


def _write(path: Path, text: str) -> None:
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(DOCS.parent)}")


if __name__ == "__main__":
    main(sys.argv[1:])
