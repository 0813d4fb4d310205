"""Test the conditions that stop a run before its last iteration."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megalite.checkpoint.lease import LeaseLost
from megalite.config import TrainingConfig
from megalite.distributed.topology import Topology
from megalite.train.stopping import (
    CHECK_SECONDS,
    RequeueNote,
    Stop,
    StopConditions,
    Stopped,
    StopSignals,
    exit_if_switched_off,
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the clock by seconds that the test sets."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def _conditions(topology: Topology, **settings: object) -> StopConditions:
    return StopConditions(TrainingConfig(**settings), topology, StopSignals(RequeueNote(None)))


def test_never_without_a_condition(topology, clock) -> None:
    stop = _conditions(topology, exit_signals=())
    clock[0] += 1e9
    assert stop.after(1000) is None


def test_at_each_multiple_of_the_interval(topology) -> None:
    stop = _conditions(topology, exit_interval=5)
    assert [iteration for iteration in range(1, 16) if stop.after(iteration)] == [5, 10, 15]
    reason = "iteration 5 is a multiple of --exit-interval 5"
    assert stop.after(5) == Stop(reason, status=0, wants_requeue=True)


def test_after_the_duration_counted_from_the_start(topology, clock) -> None:
    stop = _conditions(topology, exit_duration_in_mins=1.5)
    clock[0] += 2.0
    assert stop.after(1) is None
    clock[0] += 87.0
    assert stop.after(2) is None
    clock[0] += 2.0
    reason = "the run is older than --exit-duration-in-mins 1.5"
    assert stop.after(3) == Stop(reason, status=0, wants_requeue=True)


def test_ranks_check_less_often_if_iterations_are_short(topology, clock, monkeypatch) -> None:
    stop = _conditions(topology)
    checked: list[int] = []
    agreed = stop._agreed
    monkeypatch.setattr(stop, "_agreed", lambda: checked.append(iteration) or agreed())
    for iteration in range(1, 41):
        clock[0] += CHECK_SECONDS / 10 * 1.001 if iteration <= 30 else 1.0
        stop.after(iteration)
    assert checked[:5] == [1, 10, 19, 28, 37]  # the last of these pauses began with short iterations
    assert checked[5:] == [38, 39, 40]


@pytest.mark.parametrize(
    ("name", "status", "wants_requeue"),
    [("SIGTERM", 75, True), ("SIGUSR1", 75, True), ("SIGINT", 130, False)],
)
def test_after_a_signal(topology, name: str, status: int, wants_requeue: bool) -> None:
    stop = _conditions(topology)
    stop.signals.hold()
    stop.signals.notice(name)
    assert stop.now() == Stop(f"received {name}", status, wants_requeue, is_urgent=True)
    with pytest.raises(Stopped, match=name):
        stop.raise_if_urgent()


def test_once_the_kill_switch_is_there_before_any_signal(topology, tmp_path: Path) -> None:
    switch = tmp_path / "stop"
    stop = _conditions(topology, kill_switch_path=str(switch))
    stop.signals.hold()
    exit_if_switched_off(stop.config, topology)
    assert stop.now() is None
    switch.touch()
    stop.signals.notice("SIGTERM")
    assert stop.now() == Stop(f"--kill-switch-path {switch} exists", is_urgent=True)
    with pytest.raises(SystemExit) as end:
        exit_if_switched_off(stop.config, topology)
    assert end.value.code == 0


def test_an_age_alone_interrupts_nothing(topology, clock) -> None:
    stop = _conditions(topology, exit_duration_in_mins=1.0)
    clock[0] += 61.0
    stop.raise_if_urgent()
    assert stop.now() is not None


def test_a_run_that_has_lost_its_folder_ends(topology, lost_lease) -> None:
    """Test it without any other stop condition."""
    config = TrainingConfig(exit_signals=())
    stop = StopConditions(config, topology, StopSignals(RequeueNote(None)), lost_lease)
    with pytest.raises(LeaseLost, match=r"taken over by another run \(process"):
        stop.after(1)
