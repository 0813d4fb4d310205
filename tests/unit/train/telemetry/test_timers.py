"""Test the means of timers, and the timers of each level."""

from __future__ import annotations

import time

import pytest

from megalite.distributed.axis import Wait
from megalite.pipeline.schedules import Action, ActionKind
from megalite.train.telemetry.timers import LEVELS, Timers, timer_table


@pytest.fixture
def sleep(monkeypatch: pytest.MonkeyPatch):
    """Replace the clock by one that only moves when the test sleeps."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def sleep(seconds: float) -> None:
        now[0] += seconds

    return sleep


def test_means_of_an_iteration_and_of_a_rare_use(sleep) -> None:
    timers = Timers(level=2)
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
    timers = Timers(level=2)
    with timers("forward-backward"):
        sleep(1.0)
        with timers("batch-generator"):
            sleep(2.0)
    assert timers.take() == {"forward-backward": 3000.0, "batch-generator": 2000.0}


def test_a_part_that_raises_counts(sleep) -> None:
    timers = Timers(level=2)

    def fail() -> None:
        with timers("optimizer"):
            sleep(1.0)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert timers.take() == {"optimizer": 1000.0}


def _iteration(timers: Timers, sleep) -> None:
    """Post the events of the setup, and of one microbatch's forward that waits for its input."""
    action, wait = Action(ActionKind.FORWARD, 0), Wait("pp", "forward-recv")
    with timers("model-and-optimizer-setup"):
        sleep(1.0)
    with timers("forward-backward"):
        timers.begins(action)
        with timers("batch-generator"):
            sleep(2.0)
        timers.begins(wait)
        sleep(4.0)
        timers.ends(wait)
        timers.begins(Wait("tp", "all-reduce"))
        sleep(8.0)
        timers.ends(Wait("tp", "all-reduce"))
        timers.ends(action)


@pytest.mark.parametrize(
    ("level", "times"),
    [
        (0, {}),
        (1, {"forward-backward": 14.0}),
        (
            2,
            {"batch-generator": 2.0, "forward-recv": 4.0, "forward-compute": 10.0, "forward-backward": 14.0},
        ),
    ],
)
def test_levels(level: int, times: dict[str, float], sleep) -> None:
    timers = Timers(level=level)
    _iteration(timers, sleep)
    assert timers.take() == {"model-and-optimizer-setup": 1000.0} | {
        name: 1e3 * seconds for name, seconds in times.items()
    }


def test_level_0_reads_no_clock_in_an_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> float:
        raise AssertionError

    monkeypatch.setattr(time, "perf_counter", fail)
    timers = Timers()
    for name in LEVELS:
        with timers(name):
            pass
    assert timers.take() == {}


def test_parts_of_an_evaluation_count_in_the_evaluation(sleep) -> None:
    timers = Timers(level=2)
    with timers("eval-time"):
        timers.begins(Action(ActionKind.FORWARD, 0))
        sleep(1.0)
        timers.ends(Action(ActionKind.FORWARD, 0))
    assert timers.take() == {"eval-time": 1000.0}


TIMES = {"forward-backward": {0: 10.0, 1: 13.456, 2: 12.0}, "eval-time": {2: 5.0}}


@pytest.mark.parametrize(
    ("option", "text"),
    [
        (
            "minmax",
            "(min, max) time across ranks (ms):\n"
            "    forward-backward ...............................: (10.00, 13.46) slowest: rank 1\n"
            "    eval-time ......................................: (5.00, 5.00)",
        ),
        (
            "max",
            "max time across ranks (ms):\n"
            "    forward-backward ...............................: 13.46 slowest: rank 1\n"
            "    eval-time ......................................: 5.00",
        ),
        (
            "all",
            "times across ranks (ms):\n  forward-backward:\n     rank  0: 10.00\n     rank  1: 13.46\n"
            "     rank  2: 12.00\n  eval-time:\n     rank  2: 5.00",
        ),
    ],
)
def test_the_table_is_megatrons(option: str, text: str) -> None:
    assert timer_table(TIMES, option) == text
