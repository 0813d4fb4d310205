"""When a run ends before its last iteration."""

from __future__ import annotations

import time

import pytest

from megalite.config import TrainingConfig
from megalite.train.stop import StopConditions


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that tests set."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_never_without_a_condition(topology, clock) -> None:
    stop = StopConditions(TrainingConfig(), topology)
    clock[0] += 1e9
    assert stop.reason(1000) is None


def test_at_each_multiple_of_the_interval(topology) -> None:
    stop = StopConditions(TrainingConfig(exit_interval=5), topology)
    assert [iteration for iteration in range(1, 16) if stop.reason(iteration)] == [5, 10, 15]
    assert stop.reason(5) == "iteration 5 is a multiple of --exit-interval 5"


def test_after_the_duration_counted_from_the_start(topology, clock) -> None:
    stop = StopConditions(TrainingConfig(exit_duration_in_mins=1.5), topology)
    assert stop.reason(1) is None
    clock[0] += 89.0
    assert stop.reason(2) is None
    clock[0] += 2.0
    assert stop.reason(3) == "the run is older than --exit-duration-in-mins 1.5"


def test_whichever_comes_first(topology, clock) -> None:
    stop = StopConditions(TrainingConfig(exit_interval=5, exit_duration_in_mins=1.0), topology)
    assert stop.reason(4) is None
    clock[0] += 61.0
    assert "duration" in (stop.reason(6) or "")
    assert "interval" in (stop.reason(10) or "")
