"""What a change of the package costs does not grow."""

from __future__ import annotations

from tests.figures import above_limits, count_in_run, count_in_sources


def test_the_package_does_not_grow() -> None:
    """Check that no figure is above tests/figures.json; `python -m tests.figures` lowers the limits."""
    assert above_limits(count_in_sources() | count_in_run()) == []
