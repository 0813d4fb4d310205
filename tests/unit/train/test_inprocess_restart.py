"""Starts of a run that goes on without lost ranks; the processes' meetings are faked."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megalite.checkpoint.relayout import delete_parts_after, held_parts
from megalite.checkpoint.stored_run import StoredRun
from megalite.config import CheckpointConfig, Config
from megalite.distributed.regroup import Past, Processes, TrainingGroup
from megalite.distributed.rendezvous import Launch
from megalite.frontends.command_line import parse_run
from megalite.train import inprocess_restart
from megalite.train.inprocess_restart import Start, train_through_losses
from megalite.utils.errors import UserError

LAUNCH = Launch(0, 4, 0, 2)


def config_with(spare_nodes: int = 0, tp: int = 1) -> Config:
    flags = "--preset gpt-tiny --mock-data --vocab-size 64 --global-batch-size 4 --train-iters 10"
    config = parse_run(flags.split()).config
    config = replace(config, checkpoint=replace(config.checkpoint, spare_nodes=spare_nodes))
    return replace(config, parallel=replace(config.parallel, tensor_model_parallel_size=tp))


class FakeProcesses:
    """One process that is always in the next group; an OSError is a loss."""

    rejoins = joins = False
    num_launched = 4

    def __init__(self) -> None:
        self.own, self.sizes, self.has_left, self.status = 0, [], False, None

    def meet(self, arrival, largest) -> TrainingGroup:
        self.sizes.append([largest(number) for number in (4, 3, 2, 1)])
        return TrainingGroup(len(self.sizes) - 1, 0, [0, 1], [], arrival.past)

    def environment(self, group: TrainingGroup) -> dict[str, str]:
        return {}

    def leave(self) -> None:
        self.has_left = True

    def end(self, status: int) -> None:
        self.status = status


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> FakeProcesses:
    fake = FakeProcesses()
    watch = SimpleNamespace(
        alarmed_at=None,
        all_failed=True,
        is_loss=lambda error: isinstance(error, OSError),
        close=lambda: None,
    )
    monkeypatch.setattr(Processes, "of_launch", lambda *_: fake)
    monkeypatch.setattr(inprocess_restart, "LossWatch", lambda *_: nullcontext(watch))
    monkeypatch.setattr(inprocess_restart, "configure_logging", lambda rank: None)
    return fake


def test_a_run_goes_on_after_losses_and_spares_get_its_status(processes: FakeProcesses) -> None:
    pasts: list[Past | None] = []

    def train(start: Start) -> None:
        pasts.append(start.group.past)
        if len(pasts) == 4:
            raise SystemExit(75)
        if len(pasts) != 2:  # the second start trains nothing
            start.iteration, start.layout = 10 * len(pasts), "tp 1"
        raise OSError("a rank is gone")

    with pytest.raises(SystemExit) as end:
        train_through_losses(config_with(spare_nodes=1), LAUNCH, {}, train)
    assert end.value.code == processes.status == 75
    assert [past and past.iteration for past in pasts] == [None, 10, 10, 30]
    assert processes.sizes == [[2, 2, 2, 1]] * 4  # 2 of 4 ranks are spares


@pytest.mark.parametrize("saves_locally", [True, False])
def test_a_run_with_local_saves_does_not_wait_for_an_upload_that_a_loss_has_ended(
    processes: FakeProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves_locally: bool
) -> None:
    """It leaves it alone at its first start: a job before it has left it."""
    pytest.importorskip("obstore")
    upload = tmp_path / "upload"
    monkeypatch.setattr(StoredRun, "staged", lambda run: [upload])
    config, was_there = config_with(), list[bool]()
    checkpoint = replace(
        config.checkpoint, save="s3://b/run", non_persistent_save_interval=1 if saves_locally else None
    )

    def train(start: Start) -> None:
        upload.mkdir(exist_ok=True)
        was_there.append((upload / "file").exists())
        start.iteration = 10
        if len(was_there) == 2:
            raise SystemExit(0)
        raise OSError("a rank is gone")

    upload.mkdir()
    (upload / "file").touch()
    with pytest.raises(SystemExit):
        train_through_losses(replace(config, checkpoint=checkpoint), LAUNCH, {}, train)
    assert was_there == [True, not saves_locally]


def test_a_group_has_the_largest_size_that_the_layout_allows(processes: FakeProcesses) -> None:
    def train(start: Start) -> None:
        raise SystemExit(0)

    with pytest.raises(SystemExit):
        train_through_losses(config_with(tp=2), LAUNCH, {}, train)
    assert processes.sizes == [[4, 2, 2, 0]]


def test_a_process_of_another_launch_knows_the_spare_nodes(processes: FakeProcesses) -> None:
    def train(start: Start) -> None:
        raise SystemExit(0)

    with pytest.raises(SystemExit):
        train_through_losses(config_with(spare_nodes=1), Launch(0, 1, 0, 1), {}, train)
    assert processes.sizes == [[2, 2, 2, 1]]


def test_an_error_that_is_no_loss_ends_the_process(processes: FakeProcesses) -> None:
    def train(start: Start) -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        train_through_losses(config_with(), LAUNCH, {}, train)
    assert processes.has_left
    assert processes.status == "a bug"  # of the spares


def test_starts_that_train_nothing_are_not_repeated_for_ever(processes: FakeProcesses) -> None:
    def train(start: Start) -> None:
        raise OSError("a rank is gone")

    with pytest.raises(UserError, match="3 starts in a row have come no further: a rank is"):
        train_through_losses(config_with(), LAUNCH, {}, train)
    assert len(processes.sizes) == 4


def test_a_run_goes_on_when_more_can_train(processes: FakeProcesses) -> None:
    """The first start returns; it is no error, and the second one learns what it has done."""
    pasts: list[Past | None] = []

    def train(start: Start) -> None:
        pasts.append(start.group.past)
        if len(pasts) == 2:
            raise SystemExit(0)
        start.iteration, start.layout, start.left_at = 10, "tp 1", time.monotonic()

    with pytest.raises(SystemExit):
        train_through_losses(config_with(), LAUNCH, {}, train)
    assert [past and past.iteration for past in pasts] == [None, 10]


def test_some_nodes_must_be_left_to_train(processes: FakeProcesses) -> None:
    with pytest.raises(UserError, match="--spare-nodes 2 leaves no rank of 4 to train"):
        train_through_losses(config_with(spare_nodes=2), LAUNCH, {}, lambda start: None)


def test_parts_of_an_earlier_run_on_a_spare_node_are_deleted(tmp_path: Path) -> None:
    """A part of iteration 9 of a run that has reached 4."""
    (tmp_path / "save").mkdir()
    (tmp_path / "save" / "run_id").write_text(f"{'a' * 16} {(tmp_path / 'save').stat().st_ino}\n")
    for iteration in (4, 9):
        (tmp_path / "local" / ("a" * 16) / "rank_00001" / f"iter_{iteration:07d}").mkdir(parents=True)
    checkpoint = CheckpointConfig(
        save=str(tmp_path / "save"), non_persistent_local_ckpt_dir=str(tmp_path / "local")
    )
    delete_parts_after(checkpoint, reached=4)
    assert held_parts(checkpoint) == []  # the other one has no files
    assert [each.name for each in tmp_path.glob("local/*/*/*")] == ["iter_0000004"]
