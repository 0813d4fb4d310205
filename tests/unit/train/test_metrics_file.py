"""Test the metrics file as a program reads it."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from megalite.errors import UserError
from megalite.train.telemetry.metrics import IterationMetrics, ValidationMetrics
from megalite.train.telemetry.writers import MetricsFile

CONTRACT = {
    "iteration", "consumed_samples", "consumed_tokens", "lm_loss", "grad_norm", "learning_rate",
    "global_batch_size", "loss_scale", "skipped", "iteration_time_ms", "tokens_per_second", "tflops_per_gpu",
    "mfu", "memory_allocated_mb", "memory_reserved_mb",
}  # fmt: skip


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def _read(path: Path) -> list[dict]:
    return [json.loads(line, parse_constant=_refuse) for line in path.read_text().splitlines()]


def test_every_figure_in_full_precision(tmp_path: Path, metrics: IterationMetrics) -> None:
    path = tmp_path / "new" / "folder" / "metrics.jsonl"
    writer = MetricsFile(path)
    exact = dataclasses.replace(metrics, lm_loss=1 / 3, grad_norm=math.pi * 1e-300, warnings=("text",))
    writer.iteration(exact, {})
    (record,) = _read(path)  # before it is closed: each line is there at once
    assert record.keys() >= CONTRACT
    assert record.pop("start_time") <= record.pop("wall_time")
    optional = {"params_norm": 1 / 7, "num_zeros": 0, "sop_loss": 0.7, "decoupled_learning_rate": 1e-3}
    absent = {"warnings", *optional}
    assert record == {key: value for key, value in dataclasses.asdict(exact).items() if key not in absent}
    writer.iteration(dataclasses.replace(exact, **optional), {})
    assert {name: _read(path)[1][name] for name in optional} == optional


def test_validation(tmp_path: Path) -> None:
    writer = MetricsFile(tmp_path / "metrics.jsonl")
    writer.validation(ValidationMetrics(40, 320, "valid", 2.5))
    writer.close()
    (record,) = _read(tmp_path / "metrics.jsonl")
    assert record["validation"] == {
        "iteration": 40,
        "consumed_samples": 320,
        "split": "valid",
        "lm_loss": 2.5,
        "ppl": math.exp(2.5),
    }
    assert record["start_time"] <= record["wall_time"]


@pytest.mark.parametrize(
    ("value", "word"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")]
)
def test_floats_that_json_has_no_number_for(
    tmp_path: Path, metrics: IterationMetrics, value: float, word: str
) -> None:
    writer = MetricsFile(tmp_path / "metrics.jsonl")
    writer.iteration(dataclasses.replace(metrics, lm_loss=value), {})
    writer.validation(ValidationMetrics(1, 8, "valid", value))
    iteration, validation = _read(tmp_path / "metrics.jsonl")
    assert iteration["lm_loss"] == validation["validation"]["lm_loss"] == word


@pytest.mark.parametrize("earlier", ['{"iteration": 1}\n', '{"iteration": 1}\n{"iterat'])
def test_an_earlier_runs_lines_are_kept(tmp_path: Path, metrics: IterationMetrics, earlier: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(earlier)
    MetricsFile(path).iteration(metrics, {})
    lines = path.read_text().splitlines()
    assert lines[:-1] == earlier.splitlines()
    assert json.loads(lines[-1])["iteration"] == 100


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--metrics-file .*m\.jsonl cannot be written"):
        MetricsFile(tmp_path / "file" / "m.jsonl")
    with pytest.raises(UserError, match="Is a directory"):
        MetricsFile(tmp_path)
