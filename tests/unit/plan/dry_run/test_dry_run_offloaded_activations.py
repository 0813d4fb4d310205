"""Offloaded activations: what a dry run counts as copied is what the planner's formula says."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from megalite.frontends.command_line import parse
from megalite.plan.communication import Cluster
from megalite.plan.dry_run.dry_run import dry_run
from megalite.plan.planned_run import PlannedRun
from megalite.plan.rank_memory import offloaded_bytes
from megalite.utils.hardware.gpus import GPUS

LINE = (
    "--dry-run --mock-data --num-layers 6 --hidden-size 128 --num-attention-heads 4 --seq-length 256 "
    "--vocab-size 500 --train-iters 10 --lr 1e-3 --micro-batch-size 2 --global-batch-size 16 --bf16 "
    "--attention-dropout 0 --pp 2"
)
MICROBATCHES = 8
SLACK = 0.02
"""Statistics of norms and of attention, which are copied where they are large, and not planned."""


def moved(flags: str, rank: int, folder: Path) -> tuple[dict[str, int], list[float]]:
    """Return the copied bytes of a dry run, and the planned bytes of each group of layers of a microbatch."""
    config, notices = parse(shlex.split(f"{LINE} {flags} --rank {rank} --dry-run-json {folder}/dry.json"))
    dry_run(config, notices)
    gpu = GPUS["a100-80"]
    run = PlannedRun(config, Cluster(gpu, 2, 8, 300, 25))
    groups = offloaded_bytes(run, run.stage_kinds[rank])
    return json.loads((folder / "dry.json").read_text())["copied_bytes"], groups


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("recompute", ["", "--recompute-granularity full"])
def test_both_ways_the_planned_bytes_are_copied(recompute: str, rank: int, tmp_path: Path) -> None:
    copied, groups = moved(f"--cpu-offload-activations 2 {recompute}", rank, tmp_path)
    assert len(groups) == 2
    assert copied["down"] == pytest.approx(MICROBATCHES * sum(groups), rel=SLACK)
    assert copied["up"] == copied["down"]


def test_the_last_layer_of_the_last_stage_is_needed_before_it_leaves(tmp_path: Path) -> None:
    copied, groups = moved("--cpu-offload-activations 3", 1, tmp_path)
    assert copied["down"] == pytest.approx(MICROBATCHES * sum(groups), rel=SLACK)
    assert copied["up"] == pytest.approx(MICROBATCHES * sum(groups[:2]), rel=SLACK)


def test_the_report_says_what_an_iteration_moves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copied, _ = moved("--cpu-offload-activations 3", 1, tmp_path)
    words = " ".join(capsys.readouterr().out.split())
    down, up = (f"{copied[way] / 1e9:.3f} GB {copied[way]:,} bytes" for way in ("down", "up"))
    assert f"each iteration moves: device to host {down} host to device {up}" in words
    nothing, _ = moved("", 0, tmp_path)
    assert nothing == {"down": 0, "up": 0}
    assert "each iteration moves" not in capsys.readouterr().out
