"""A hang ends with one report, which names the ranks that did not arrive."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megalite.config import ParallelConfig
from megalite.train.callbacks.hang_report import PREFIX, analysis_of, recorder_of
from megalite.train.callbacks.watchdog import HANG_STATUS
from tests.ranks.train.callbacks.hanging import (
    NUM_RANKS,
    run_with_fault,
    skip_collectives,
    sleep_in_data,
    stop_process,
)

DP4 = ParallelConfig(1, 1, 4)
TP2_DP2 = ParallelConfig(2, 1, 2)
PP2_DP2 = ParallelConfig(1, 2, 2)


def _stacks(folder: Path) -> list[int]:
    """Return the ranks whose stacks were written."""
    return sorted(int(path.stem.removeprefix("rank_")) for path in folder.glob("hang_0000001/rank_*.txt"))


@pytest.mark.parametrize("layout", [PP2_DP2, pytest.param(TP2_DP2, marks=pytest.mark.slow)], ids=["pp", "tp"])
def test_a_rank_that_waits_for_its_data_is_named(layout: ParallelConfig, tmp_path: Path) -> None:
    outcome = run_with_fault(sleep_in_data, 3, layout, tmp_path)
    assert outcome.statuses == [HANG_STATUS] * NUM_RANKS, outcome.errors
    (report,) = outcome.reports
    lines = report.splitlines()
    assert lines[1].startswith("  did not arrive: rank 3 (")
    assert re.match(
        r"  rank 3: iteration 2, reading data from sample \d+ on, in forward of microbatch 0 for", lines[2]
    )
    assert re.search(r"  ranks? 0.*: iteration 2, all-reduce of the loss over dp for", report)
    assert "return read.result()" in report
    assert _stacks(tmp_path) == [0, 1, 2, 3]
    if recorder_of("cpu"):
        folder = tmp_path / "hang_0000001"
        assert f"  their last collectives: {analysis_of(folder, 'cpu')}\n" in report
        records = [pickle.loads((folder / f"{PREFIX}{rank:05}").read_bytes()) for rank in range(NUM_RANKS)]
        assert {each["entries"][-1]["profiling_name"] for each in records} == {"gloo:all_reduce"}
    assert "thread prefetch_0" in (tmp_path / "hang_0000001/rank_00003.txt").read_text()


@pytest.mark.slow
def test_collectives_of_zero_stage_3_are_named(tmp_path: Path) -> None:
    outcome = run_with_fault(sleep_in_data, 2, replace(DP4, zero_stage=3), tmp_path)
    assert outcome.statuses == [HANG_STATUS] * NUM_RANKS, outcome.errors
    (report,) = outcome.reports
    assert "did not arrive: rank 2 (" in report
    assert "ranks 0-1, 3: iteration 2, all-gather of weights over dp, in forward of microbatch 0" in report


@pytest.mark.slow
def test_a_rank_that_skipped_a_collective_is_named(tmp_path: Path) -> None:
    outcome = run_with_fault(skip_collectives, 2, DP4, tmp_path)
    assert outcome.statuses == [HANG_STATUS] * NUM_RANKS, outcome.errors
    (report,) = outcome.reports
    assert "did not arrive: rank 2 (every rank waits, but these started fewer collectives" in report
    assert "rank 2: iteration 2, barrier over all ranks" in report
    assert "ranks 0-1, 3: iteration 2, all-reduce of the loss over dp" in report


@pytest.mark.slow
def test_a_rank_that_is_stopped_did_not_answer(tmp_path: Path) -> None:
    outcome = run_with_fault(stop_process, 3, TP2_DP2, tmp_path)
    assert outcome.statuses == [HANG_STATUS] * 3 + [None], outcome.errors
    (report,) = outcome.reports
    assert "did not arrive: rank 3 (" in report
    assert "rank 3: did not answer; last status: iteration" in report
    assert "rank 2: iteration 2, all-reduce over tp, in " in report
    assert _stacks(tmp_path) == [0, 1, 2]


def test_ranks_end_alone_without_the_store(tmp_path: Path) -> None:
    outcome = run_with_fault(stop_process, 0, DP4, tmp_path)
    assert outcome.statuses == [None] + [HANG_STATUS] * 3, outcome.errors
    assert len(outcome.reports) == 3
    for rank in (1, 2, 3):
        assert f"rank {rank} has made no progress" in outcome.errors[rank]
        assert "suspect rank 0" in outcome.errors[rank]
        assert f"rank {rank}: iteration 2, all-reduce of the loss over dp" in outcome.errors[rank]
    assert _stacks(tmp_path) == [1, 2, 3]
