"""What a long build says: how far it is, on whichever rank; a short one nothing."""

from __future__ import annotations

import logging
import time

import numpy as np
import pytest

from megalite.data import _index_builder, index_cache


def test_a_long_build_tells_and_a_short_one_does_not(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "megalite")
    for interval, reported_progress in ((0.1, True), (60, False)):
        monkeypatch.setattr(index_cache, "INTERVAL_SECONDS", interval)
        with index_cache.reported_progress("the order of x", "documents", 4001) as progress:
            _index_builder.LegacyRandom(1).fill_shuffled(np.empty(2001, np.int32), 0, 2001, progress)
            assert progress.done == 2000  # the last one has no choice
            deadline = time.monotonic() + (300 if reported_progress else 0.3)
            while not caplog.records and time.monotonic() < deadline:
                time.sleep(0.01)
        lines = [record.getMessage() for record in caplog.records]
        expected = "building the order of x: 2,000 of 4,001 documents (50%)"
        assert any(line.startswith(expected) for line in lines) is reported_progress
        assert all(record.this_rank for record in caplog.records)  # type: ignore[attr-defined]
        caplog.clear()
