"""When a run hangs: poll by poll, without a clock, several ranks of one store in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from megalite.distributed.axes import MeshOptions
from megalite.distributed.axis import CHECKPOINT, EventStack, Wait
from megalite.distributed.topology import Topology
from megalite.pipeline.schedules import Action, ActionKind
from megalite.train.callbacks import watchdog
from megalite.train.callbacks.hang_report import all_stacks
from megalite.train.callbacks.watchdog import HANG_STATUS, NoAnswer, StatusStore, Watchdog
from tests.programs import run_program
from tests.trial_axis import INNERMOST, OUTSIDE_TP, with_trial

ACTION = Action(ActionKind.FORWARD, 0)
POLLS = 20
"""Number of polls within the time-out."""
TIMEOUT = POLLS / 1024


class Left(Exception):
    """Raised instead of ending the process."""


class World:
    """Watchdogs of several ranks that wait in a collective, and the ranks that have exited."""

    def __init__(
        self, num_ranks: int, folder: Path, mesh: MeshOptions | None = None, axis: str = "world"
    ) -> None:
        self.left: list[int] = []
        self.num_done = [1] * num_ranks
        store = dist.HashStore()  # type: ignore[attr-defined]
        self.dogs: list[Watchdog] = []
        self.events: list[EventStack] = []
        for rank in range(num_ranks):
            with Topology.fake(mesh or MeshOptions(), num_ranks, rank) as topology:
                statuses = StatusStore(store, rank, num_ranks, patience=5.0)
                dog = Watchdog(TIMEOUT, topology, statuses, folder, self._done(rank), self._leave(rank))
                topology.events.begins(Wait(axis, "all-reduce"))
                self.events.append(topology.events)
            self.num_done[rank] = 2  # the first iteration is over
            self.dogs.append(dog)

    def tick(self, *ranks: int, times: int = 1) -> None:
        for _ in range(times):
            for rank in ranks:
                if rank not in self.left:
                    self.dogs[rank].tick()

    def _done(self, rank: int) -> Callable[[], int]:
        return lambda: self.num_done[rank]

    def _leave(self, rank: int) -> Callable[[int], None]:
        def leave(status: int) -> None:
            assert status == HANG_STATUS
            self.left.append(rank)

        return leave


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_LEAVE_SECONDS", 0.0001)
    monkeypatch.setattr(watchdog, "_PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(watchdog, "call_within", lambda seconds, function: function())
    monkeypatch.setattr(watchdog, "_num_collectives", lambda topology: ())


@pytest.fixture
def world(tmp_path: Path, quick: None) -> World:
    return World(3, tmp_path)


def test_a_hang_on_an_axis_of_the_table_alone_is_named(
    tmp_path: Path, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 is silent: of the four ranks, only the other one on its line of the axis waits for it."""
    mesh = with_trial(MeshOptions({"tp": 2}), OUTSIDE_TP)
    world = World(4, tmp_path, mesh, "trial")
    world.tick(0, 1, 2, 3)
    world.tick(0, 2, 3, times=POLLS + 10)
    assert sorted(world.left) == [0, 2, 3]
    text = capsys.readouterr().err
    assert "all-reduce over trial" in text
    assert [world.dogs[rank]._updated_status().waits_for for rank in (0, 3)] == [(0, 2), (1, 3)]


def test_collectives_are_counted_on_every_axis_but_the_pipelines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "num_collectives", lambda group: 7)
    mesh = with_trial(MeshOptions({"tp": 2, "pp": 2}), INNERMOST)
    with Topology.fake(mesh, 8, 0) as topology:
        assert watchdog._num_collectives(topology) == (((0, 2), 7), ((0, 1), 7))


def test_ranks_that_are_all_stuck_end_with_one_report(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.tick(0, 1, 2, times=POLLS)
    assert world.left == []  # the first look saw an iteration
    world.tick(0, 1, 2, times=2)
    assert sorted(world.left) == [0, 1, 2]
    assert capsys.readouterr().err.count("error: hang") == 1


def test_a_rank_that_makes_progress_keeps_the_run(world: World) -> None:
    for _ in range(3 * POLLS):
        world.dogs[2].begins(ACTION)
        world.tick(0, 1, 2)
    assert world.left == []
    world.tick(0, 1, 2, times=POLLS + 2)
    assert sorted(world.left) == [0, 1, 2]


def test_a_silent_rank_does_not_keep_the_run(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.tick(0, 1, 2)
    world.tick(0, 1, times=POLLS + 10)
    assert sorted(world.left) == [0, 1]
    assert "did not arrive: rank 2" in (text := capsys.readouterr().err)
    assert "rank 2: did not answer; last status: iteration 3" in text


def test_a_higher_rank_reports_where_the_lowest_is_silent(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.tick(0, 1, 2)
    world.tick(1, 2, times=POLLS + 10)
    assert sorted(world.left) == [1, 2]
    assert capsys.readouterr().err.count("did not arrive: rank") == 1


def test_a_rank_whose_training_is_over_is_named(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.tick(0, 1, 2)
    world.dogs[1].post_end()
    world.tick(0, 2, times=POLLS + 10)
    assert sorted(world.left) == [0, 2]
    assert "rank 1: has left training after iteration 2" in capsys.readouterr().err


def test_a_checkpoint_may_take_any_time(world: World) -> None:
    with world.events[1].during(CHECKPOINT):
        world.tick(0, 1, 2, times=5 * POLLS)
    assert world.left == []


@pytest.mark.parametrize("is_layout_new", [False, True])
def test_the_first_iteration_may_take_longer(is_layout_new: bool, world: World) -> None:
    for rank in range(3):
        if is_layout_new:
            world.dogs[rank].start_anew()
        else:
            world.num_done[rank] = 1
    world.tick(0, 1, 2, times=3 * POLLS - 1)
    assert world.left == []
    world.tick(0, 1, 2, times=3)
    assert sorted(world.left) == [0, 1, 2]


def test_after_long_actions_a_rank_may_be_idle_longer(world: World) -> None:
    world.num_done[0] = 1  # in its first iteration, of slow actions
    for _ in range(2):
        world.tick(0, 1, 2, times=POLLS)
        world.tick(0, 1, 2, times=POLLS)
        world.dogs[0].ends(ACTION)
    world.num_done[0] = 2
    world.tick(0, 1, 2, times=3 * POLLS)
    assert world.left == []


def test_without_the_store_a_rank_ends_alone(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def silent(*_: object) -> None:
        raise NoAnswer("no answer in 5 s")

    monkeypatch.setattr(StatusStore, "post", silent)
    world.tick(1, times=POLLS)
    assert world.left == []
    world.tick(1)
    assert world.left == [1]
    assert "rank 1 has made no progress for 0 s" in capsys.readouterr().err


def test_a_store_that_never_answers_is_not_called_again() -> None:
    released = threading.Event()

    class Stopped:
        def add(self, *_: object) -> None:
            released.wait()

    statuses = StatusStore(Stopped(), 0, 1, patience=0.05)  # type: ignore[arg-type]
    for call in (lambda: statuses.end_run(1), statuses.num_ready):
        with pytest.raises(NoAnswer, match="no answer"):
            call()
    released.set()


def test_a_rank_ends_though_its_collectives_cannot_be_read(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def out_of_time(seconds: float, function: Callable[[], object]) -> object:
        raise NoAnswer("no answer in 5 s")

    world.dogs[1]._recorder = lambda **_: b""
    monkeypatch.setattr(watchdog, "_PATIENCE_SECONDS", 5.0)
    monkeypatch.setattr(watchdog, "call_within", out_of_time)
    monkeypatch.setattr(watchdog, "_print", print)
    world.dogs[1]._end(1)
    assert world.left == [1]
    assert "error: the last collectives cannot be written (no answer in 5 s)" in capsys.readouterr().out


_STUCK_IN_C = """
import re
from pathlib import Path
import torch.distributed as dist
from megalite.distributed.axes import MeshOptions
from megalite.distributed.topology import Topology
from megalite.train.callbacks import watchdog
from megalite.train.callbacks.watchdog import StatusStore

watchdog._PATIENCE_SECONDS = 0.1
with Topology.fake(MeshOptions(), 1, 0) as topology:
    dog = watchdog.Watchdog(1.0, topology, StatusStore(dist.HashStore(), 0, 1, 5.0), Path("unused"))
    dog._recorder = lambda **_: re.match("(a+)+$", "a" * 60 + "b")  # years, and no other thread can run
    dog._write_records()
"""


def test_a_recorder_that_holds_pythons_lock_ends_the_process(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(_STUCK_IN_C)
    found = run_program(tmp_path / "stuck.py")
    assert found.returncode == 1
    assert "Timeout (0:00:00.2" in found.stderr
    assert "write_records" in found.stderr


def test_stacks_name_every_thread() -> None:
    text = all_stacks()
    assert text.startswith("thread MainThread:")
    assert "test_stacks_name_every_thread" in text
