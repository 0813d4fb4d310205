"""Read published runs in 16, 8 and 4 bits; half of them are planned once, when the constants are final.

`published_rows.csv` is the open half, `published_rows_blind.csv` the other one. The first byte of the
SHA-256 of `source|task|gpu|precision|model` decides, so all releases of a setting are in the same half.
Columns:

    settings         what the recipe sets besides the layout, in the release's tag of its repository
    recipe_differs   sizes in which the nearest recipe differs from the row: its settings may differ too
    tokens_s_gpu     as published, as tflops_gpu
"""

from __future__ import annotations

import csv
import hashlib
from pathlib import Path

OPEN = Path(__file__).with_name("published_rows.csv")
BLIND = Path(__file__).with_name("published_rows_blind.csv")
BLIND_SHA256 = "461aaaed5a27842509aa2bf57dce457cea68569815cee886dddafd9aa9207959"
"""Of the blind half, from before the planner planned any of these rows."""


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a half.

    Raises:
        ValueError: the blind half was changed.
    """
    content = path.read_bytes()
    if path == BLIND and hashlib.sha256(content).hexdigest() != BLIND_SHA256:
        raise ValueError(f"{path.name} is not the file whose hash was committed")
    return list(csv.DictReader(content.decode().splitlines()))
