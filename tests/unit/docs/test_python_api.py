"""docs/python_api.md lists every public name and every hook, and shows code that the examples have."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import megalite
from megalite.train.loop import HOOKS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "python_api.md").read_text(encoding="utf-8")


def _rows(section: str) -> list[str]:
    """Return the first cell's code of each row of the tables in a section."""
    text = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    (part,) = (each for each in text if each.startswith(section))
    return re.findall(r"^\| `([^`]+)` \|", part, re.MULTILINE)


def test_every_public_name_has_a_row() -> None:
    rows = _rows("Public names")
    assert sorted(rows) == sorted(megalite.__all__)


def test_every_public_name_has_documentation() -> None:
    for name in megalite.__all__:
        if name != "__version__":
            documentation = inspect.getdoc(getattr(megalite, name)) or ""
            assert documentation.split("\n")[0].endswith("."), name
            assert not documentation.startswith(f"{name}("), f"{name} has a dataclass's default docstring"


def test_every_hook_has_a_row_with_its_arguments() -> None:
    calls = {
        f"{name}({', '.join(list(inspect.signature(hook).parameters)[1:])})" for name, hook in HOOKS.items()
    }
    assert set(_rows("Callbacks")) == calls


def test_the_code_of_the_page_is_the_code_of_the_examples() -> None:
    shown = [
        line.strip()
        for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
        for line in block.splitlines()
    ]
    parity = [ROOT / "tests" / "parity" / f"test_{name}.py" for name in ("own_model", "loss_terms")]
    tested = [*(ROOT / "examples").glob("*.py"), *parity]
    code = re.sub(r"\s+", " ", " ".join(path.read_text(encoding="utf-8") for path in tested))
    assert len(shown) > 8
    for line in shown:
        assert re.sub(r"\s+", " ", line) in code, line
