"""A run whose layout changes, as a user runs it: --layout-at, checkpoints around the change, a restart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.conftest import Run


def _losses(folder: Path) -> dict[str, float]:
    """Return the losses of iterations and evaluations by what they are; each is in the metrics file once."""
    found: dict[str, float] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "layout_change" in record:
            continue
        evaluation = record.get("validation")
        name = f"{evaluation['split']} {evaluation['iteration']}" if evaluation else str(record["iteration"])
        assert name not in found
        found[name] = (evaluation or record)["lm_loss"]
    return found


@pytest.mark.parametrize("more", [(), pytest.param(("--compile",), marks=pytest.mark.slow)])
def test_a_run_in_three_layouts_is_the_run_in_one(
    pretrain: Run, tmp_path: Path, more: tuple[str, ...]
) -> None:
    flags = [
        *("--pp", "2", "--params-dtype", "fp64"),
        *("--train-iters", "6", "--lr", "0.01", "--eval-interval", "4"),
    ]

    def run(folder: Path, *options: str) -> str:
        done = pretrain(*flags, "--save", str(folder), "--load", str(folder), *more, *options, ranks=2)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(whole)
    changing = ["--save-interval", "2", "--layout-at", "1:tp2+sp", "3:dp2+zero3"]
    log = run(parts, *changing, "--exit-interval", "4")
    assert "--layout-at 1:tp2+sp: the change needs up to" in log
    assert "layout after iteration 1: tp2+sp instead of pp 2 dp 1 tp 1" in log
    assert "layout after iteration 3: dp2+zero3 instead of pp 1 dp 1 tp 2" in log
    file = tmp_path / "layout"
    file.write_text("tp2\n")
    log = run(parts, *changing, "--layout-file", str(file))
    assert "--layout-at 3:dp2+zero3: the change needs up to" in log
    assert "layout after iteration 4: dp2+zero3 instead of pp 2 dp 1 tp 1" in log
    assert f"--layout-file {file}, tp2: the change needs up to" in log
    assert "layout after iteration 5: tp2 instead of pp 1 dp 2 tp 1" in log
    assert not file.exists()
    records = map(json.loads, (parts / "metrics.jsonl").read_text().splitlines())
    changes = [each["layout_change"] for each in records if "layout_change" in each]
    assert [(each["iteration"], each["after"]) for each in changes] == [
        *((1, "tp2+sp"), (3, "dp2+zero3"), (4, "dp2+zero3"), (5, "tp2")),
    ]
    saved = [json.loads((parts / f"iter_000000{each}" / "run.json").read_text()) for each in (2, 4, 6)]
    assert [each["layout"]["tp"] for each in saved] == [2, 1, 2]
    assert [each["layout"]["dp"] for each in saved] == [1, 2, 1]
    assert _losses(parts) == pytest.approx(_losses(whole), rel=1e-9 if more else 1e-12)
