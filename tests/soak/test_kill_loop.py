"""A sample of the soak, and what it would notice."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tests.soak import lost_nodes, lost_ranks
from tests.soak.folder import is_whole, losses_of, newest_whole, traces_of_saving
from tests.soak.kill_loop import Plan, compare, soak


def _plan(kills: int, ranks: int, layout: str) -> Plan:
    flags = layout.split()
    return Plan(kills, ranks, save_interval=3, layout=flags, whole_group=0.3, seed=kills, timeout=600.0)


def test_two_kills_one_of_them_during_a_save(tmp_path: Path) -> None:
    said: list[str] = []
    assert soak(_plan(2, 2, "--zero-stage 1"), tmp_path, said.append) == ("2 kills, 2 resumed, 0 lost", True)
    assert "during a save" in said[1]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["--tp 2 --pp 2", "--tp 2 --zero-stage 1 --async-save"])
def test_four_kills_on_four_ranks(tmp_path: Path, layout: str) -> None:
    assert soak(_plan(4, 4, layout), tmp_path, print) == ("4 kills, 4 resumed, 0 lost", True)


@pytest.mark.slow
def test_four_nodes_are_lost(tmp_path: Path) -> None:
    assert lost_nodes.soak(4, 3, tmp_path) == ("4 kills, 4 resumed, 0 lost", True)


def test_a_spare_takes_the_place_of_a_killed_rank(tmp_path: Path) -> None:
    launches = [(3, 1, "--zero-stage 1 --spare-nodes 1")]
    result = lost_ranks.soak(1, 0, tmp_path, launches=launches, joins=0.0)
    assert result == ("1 kills, 1 survived, 0 lost", True)


@pytest.mark.slow
def test_a_process_of_another_launch_takes_the_place_of_a_killed_rank(tmp_path: Path) -> None:
    said: list[str] = []
    launches = [(2, 1, "--zero-stage 1")]
    result = lost_ranks.soak(1, 0, tmp_path, said.append, launches=launches, joins=1.0)
    assert result == ("1 kills, 1 survived, 0 lost", True)
    assert "1 processes joined, with which training was enlarged 1 times" in said


@pytest.mark.slow
def test_eight_ranks_are_killed(tmp_path: Path) -> None:
    assert lost_ranks.soak(8, 3, tmp_path) == ("8 kills, 8 survived, 0 lost", True)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """Two whole ones, of iterations 3 and 6."""
    for iteration in (3, 6):
        checkpoint = tmp_path / f"iter_{iteration:07d}"
        checkpoint.mkdir()
        sums = []
        for name, text in (("run.json", "{}"), ("a.safetensors", str(iteration))):
            (checkpoint / name).write_text(text)
            sums.append(f"{hashlib.sha256(text.encode()).hexdigest()}  {name}\n")
        (checkpoint / "SHA256SUMS").write_text("".join(sums))
    (tmp_path / "latest").write_text("iter_0000006\n")
    return tmp_path


def test_a_checkpoint_that_is_not_whole_is_noticed(checkpoints: Path) -> None:
    assert newest_whole(checkpoints) == 6
    (checkpoints / "iter_0000006" / "a.safetensors").write_text("7")
    assert not is_whole(checkpoints / "iter_0000006")
    assert newest_whole(checkpoints) == 3
    (checkpoints / "iter_0000003" / "run.json").unlink()
    assert newest_whole(checkpoints) == 0


def test_a_save_that_goes_on_is_told_from_what_an_earlier_one_left(checkpoints: Path) -> None:
    left = checkpoints / ".iter_0000009.partial"
    left.mkdir()
    stale = traces_of_saving(checkpoints)
    assert {name for name, _ in stale} == {left.name}
    (left / "a.safetensors").touch()
    assert traces_of_saving(checkpoints) - stale
    (checkpoints / "latest").write_text("iter_0000003\n")
    assert {name for name, _ in traces_of_saving(checkpoints)} >= {"iter_0000006"}


def test_a_loss_that_differs_or_misses_counts_as_lost(checkpoints: Path, tmp_path: Path) -> None:
    def write(folder: Path, losses: list[tuple[int, float]]) -> None:
        lines = [json.dumps({"iteration": iteration, "lm_loss": loss}) for iteration, loss in losses]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")

    other = tmp_path / "other"
    other.mkdir()
    (other / "latest").write_text("iter_0000006\n")
    (other / "iter_0000006").symlink_to(checkpoints / "iter_0000006")
    write(checkpoints, [(1, 5.0), (2, 4.0), (3, 3.0)])
    write(other, [(1, 5.0), (2, 4.0), (2, 4.0), (3, 3.0)])
    assert compare(other, checkpoints) == 0
    write(other, [(1, 5.0), (2, 4.0), (2, 4.5)])
    assert losses_of(other)[2] == {4.0, 4.5}
    assert compare(other, checkpoints) == 2
