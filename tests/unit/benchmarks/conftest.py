"""Scripts of benchmarks/ import each other as programs do: by their names alone."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
