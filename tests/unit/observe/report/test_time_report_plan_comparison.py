"""Test the comparison of a run with a plan, and the plans and runs that cannot be compared."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from megalite.cli import plan, report
from megalite.observe.report.run_folder import open_run
from megalite.observe.report.time_report import _COMPUTING, _WAITING, planned_terms, time_comparison
from megalite.train.telemetry.time_terms import COMPUTING, RankTime, time_sample
from megalite.utils.errors import UserError
from tests.run_folder import iteration, write_metrics

FLAGS = ["--preset", "gpt-tiny", "--vocab-size", "256", "--gpu", "a100-80", "--global-batch-size", "8"]


def _plan(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> Path:
    plan.plan([*FLAGS, "--json", *flags])
    file = folder / "plan.txt"
    file.write_text(capsys.readouterr().out)
    return file


def _run(folder: Path, planned: dict[str, Any], **changes: Any) -> Path:
    """Write a run of the planned model, whose ranks wait for data and are else as fast as planned."""
    times = {"data": 1.0} | {
        term: seconds for term, seconds in planned_terms(planned).items() if term in (*COMPUTING, "dp wait")
    }
    ranks = [RankTime(rank, "host", {"pp": 0, "dp": rank, "tp": 0}, times) for rank in range(2)]
    sample = time_sample(1, 1, ranks, {"pp": 1, "dp": 2, "tp": 1}, {}, lambda _: 0.0)
    rates = {name: planned[name] for name in ("tokens_per_second", "tflops_per_gpu")}
    record = iteration(1, 0.0, 1.0, consumed_tokens=512, **rates) | {
        "time_breakdown": dataclasses.asdict(sample)
    }
    return write_metrics(folder / "metrics.jsonl", [record | changes])


def test_a_run_loses_what_the_plan_does_not_expect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = _plan(tmp_path, capsys, "--dp", "2", "--micro-batch-size", "4")
    planned = json.loads(file.read_text())
    run = open_run(_run(tmp_path, planned))
    comparison = time_comparison(run, file)
    assert comparison is not None
    assert planned["seconds_by_kind"].keys() == _COMPUTING.keys() | _WAITING.keys()
    assert comparison.expected == pytest.approx(planned["iteration_time_s"])
    assert {term.name for term in comparison.terms if term.lost > 1e-9} == {"data"}
    report.main([str(tmp_path / "metrics.jsonl"), "--against-plan", str(file)])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("mean of 1 measured iteration; expected: the plan ")
    assert {"GEMMs", "kernel launches", "data"} <= {line.split("  ")[0] for line in printed}
    assert printed[-2].startswith("data cost 1000.0 ms (100%)")
    page = Path(printed[-1]).read_text()
    assert 'class="waterfall"' in page
    assert "data cost 1000.0 ms" in page


def test_an_uneven_stage_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Test that the head's stage, which works longest, is compared with the median stage."""
    file = _plan(tmp_path, capsys, "--pp", "4", "--num-layers", "4", "--micro-batch-size", "1")
    planned = json.loads(file.read_text())
    terms = planned_terms(planned)
    assert sum(terms.values()) == pytest.approx(planned["iteration_time_s"])
    assert terms["stage imbalance"] > 0.0
    assert terms["bubble"] == planned["seconds_by_kind"]["bubble"]
    assert terms["GEMMs"] == planned["median_stage_seconds_by_kind"]["products"]


@pytest.mark.parametrize(
    ("flags", "changes", "message"),
    [
        (
            ["--dp", "2", "--num-layers", "8"],
            {},
            "of another run: it has .* GFLOP per token, the run .*: another",
        ),
        (["--tp", "2"], {}, "of another run: it has layout pp 1 dp 1 tp 2, the run pp 1 dp 2 tp 1: pass the"),
        (["--dp", "2"], {"global_batch_size": 16}, "it has 512 tokens per iteration, the run 1,024"),
        (
            ["--dp", "2"],
            {"time_breakdown": None},
            "does not say where .*: train with --log-time-breakdown, and",
        ),
        (["--dp", "2", "--search"], {}, "is a search of layouts: plan the layout of the run"),
    ],
    ids=["model", "layout", "batch", "nothing recorded", "search"],
)
def test_a_plan_that_does_not_fit_the_run(
    flags: list[str],
    changes: dict[str, Any],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    right = json.loads(_plan(tmp_path, capsys, "--dp", "2", "--micro-batch-size", "4").read_text())
    run = open_run(_run(tmp_path, right, **changes))
    with pytest.raises(UserError, match=message):
        time_comparison(run, _plan(tmp_path, capsys, *flags, "--micro-batch-size", "4"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("iteration 5", "is not a plan in JSON"),
        ("[1]", "is not a plan of one layout"),
    ],
)
def test_a_file_that_is_no_plan(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = open_run(_run(tmp_path, json.loads(_plan(tmp_path, capsys, "--dp", "2").read_text())))
    if text is not None:
        (tmp_path / "p").write_text(text)
    with pytest.raises(UserError, match=f"{message}.*: pass the output of `megalite plan --json`"):
        time_comparison(run, tmp_path / "p")


def test_a_plan_is_of_one_run(tmp_path: Path) -> None:
    files = [
        write_metrics(tmp_path / name / "metrics.jsonl", [iteration(1, 0.0, 1.0)]) for name in ("a", "b")
    ]
    with pytest.raises(UserError, match="is the plan of one run: pass one RUN"):
        report.main([*map(str, files), "--against-plan", "plan.json"])
