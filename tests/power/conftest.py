"""The end of the ranks that stay alive from test to test of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.live_ranks import RANKS


@pytest.fixture(scope="package", autouse=True)
def live_ranks() -> Iterator[None]:
    with RANKS:
        yield
