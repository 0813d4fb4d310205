from __future__ import annotations

import shlex
from collections.abc import Callable

import pytest

from megalite.frontends.command_line import parse
from megalite.utils.errors import ConfigError


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables of a launcher."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def problems() -> Callable[[str], list[str]]:
    """Return a function that returns the errors of a command line."""

    def of(line: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            parse(shlex.split(line))
        return list(caught.value.problems)

    return of
