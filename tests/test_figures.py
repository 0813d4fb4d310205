"""What a change of the package costs does not grow."""

from __future__ import annotations

from tests.figures import above_limits, count_in_run, count_in_sources, lower


def test_the_package_does_not_grow() -> None:
    """Check that no figure is above tests/figures.json; `python -m tests.figures` lowers the limits."""
    assert above_limits(count_in_sources() | count_in_run()) == []


def test_limits_fall_and_a_feature_has_a_price() -> None:
    record = {"limits": {"lines": 100, "files": 10}, "prices": {"phases": {"lines": 5}}}
    assert lower(record, {"lines": 90, "files": 11}) == {
        "limits": {"lines": 85, "files": 10},
        "prices": {"phases": {"lines": 5}},
    }
    assert lower(record, {"lines": 112, "files": 9}, "phases") == {
        "limits": {"lines": 100, "files": 9},
        "prices": {"phases": {"lines": 12}},
    }
    assert lower(record, {"lines": 112, "files": 10}, "shards")["prices"] == {
        "phases": {"lines": 5},
        "shards": {"lines": 7},
    }
