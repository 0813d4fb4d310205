"""The names that docs/releasing.md calls stable are recorded, and all are still exported."""

from __future__ import annotations

from pathlib import Path

import megalite

RECORDED = (Path(__file__).parent / "stable_names.txt").read_text(encoding="utf-8").split()


def test_every_stable_name_is_exported_and_every_exported_name_is_recorded() -> None:
    exported = set(megalite.__all__)
    assert [name for name in RECORDED if name not in exported] == [], "deprecate it first: docs/releasing.md"
    assert sorted(exported) == sorted(RECORDED), "add the new name to stable_names.txt"
    assert all(hasattr(megalite, name) for name in RECORDED)
