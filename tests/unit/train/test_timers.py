"""Which mean a timer tells."""

from __future__ import annotations

import time

import pytest

from megalite.train.timers import Timers


@pytest.fixture
def sleep(monkeypatch: pytest.MonkeyPatch):
    """A clock that moves by sleeping alone."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def sleep(seconds: float) -> None:
        now[0] += seconds

    return sleep


def test_means_of_an_iteration_and_of_a_rare_use(sleep) -> None:
    timers = Timers()
    for _ in range(4):
        for _ in range(2):
            with timers("batch-generator"):
                sleep(0.25)
        with timers("optimizer"):
            sleep(1.0)
    with timers("eval-time"):
        sleep(10.0)
    assert timers.take(4) == {"batch-generator": 500.0, "optimizer": 1000.0, "eval-time": 10000.0}
    assert timers.take(4) == {}


def test_a_part_within_a_part_counts_in_both(sleep) -> None:
    timers = Timers()
    with timers("forward-backward"):
        sleep(1.0)
        with timers("batch-generator"):
            sleep(2.0)
    assert timers.take() == {"forward-backward": 3000.0, "batch-generator": 2000.0}


def test_a_part_that_raises_counts(sleep) -> None:
    timers = Timers()

    def fail() -> None:
        with timers("optimizer"):
            sleep(1.0)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert timers.take() == {"optimizer": 1000.0}
