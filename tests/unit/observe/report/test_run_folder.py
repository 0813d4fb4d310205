"""Finding a run's files, and saying what is missing."""

from __future__ import annotations

import gzip
import re
from html import escape
from pathlib import Path

import pytest
import torch

from megalite.cli.train import main
from megalite.config import LoggingConfig
from megalite.frontends.command_line import parse
from megalite.observe.report.page import page
from megalite.observe.report.run_folder import open_run, trace_summary
from megalite.train.telemetry.dashboards import TensorBoardWriter
from megalite.train.telemetry.metrics import IterationMetrics, ValidationMetrics
from megalite.train.tracing import Lane, TraceSpan, write_trace
from megalite.utils.errors import UserError
from megalite.utils.hardware.gpus import device_name
from tests.run_folder import evaluation, iteration, write_metrics, write_restarted_run


def test_a_folder_and_its_metrics_file_are_the_same_run(tmp_path: Path) -> None:
    folder = write_restarted_run(tmp_path / "mine")
    for path in (folder, folder / "metrics.jsonl"):
        run = open_run(path)
        assert (run.name, run.source) == ("mine", folder / "metrics.jsonl")
        assert [checkpoint.iteration for checkpoint in run.checkpoints] == [100]
        assert run.config.startswith("model:") and run.config_source.endswith("iter_0000100/config.yaml")
        assert run.logs == (folder / "train.log",)


def test_several_runs_in_one_folder(tmp_path: Path) -> None:
    """Which of them a checkpoint beside them is of, nobody can tell."""
    folder = write_restarted_run(tmp_path)
    other = write_metrics(folder / "other.jsonl", [iteration(1, 0.0, 1.0)])
    with pytest.raises(
        UserError, match=r"several runs: pass one or more of them: .*metrics\.jsonl .*other\.jsonl"
    ):
        open_run(folder)
    run = open_run(other)
    assert (run.name, run.checkpoints, run.config, run.logs) == ("other", (), "", ())


def test_the_summary_of_a_run_that_only_saves(tmp_path: Path) -> None:
    """With --save the metrics file is there, and the newest checkpoint says what ran where."""
    words = "--preset gpt-tiny --mock-data --vocab-size 256 --train-iters 2 --eval-iters 0 --log-interval 1"
    with pytest.raises(SystemExit) as caught:
        main([*words.split(), "--save", str(tmp_path / "mine")])
    assert caught.value.code == 0
    text = page([open_run(tmp_path / "mine")])
    assert "4 layers, 4 heads, hidden size 64, sequence length 64, vocabulary 256" in text
    assert "<td>220,544</td>" in text
    assert "<td>pp 1 x dp 1 x tp 1</td>" in text
    assert f"<td>1 rank on CPU ({escape(device_name(torch.device('cpu')))})</td>" in text
    assert ">memory of a rank<" in text
    assert "GPU" not in re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL)
    assert "<td>checkpoints, config (without pipeline trace, logs)</td>" in text


def test_no_metrics_file() -> None:
    assert LoggingConfig().metrics_path("runs/mine") == Path("runs/mine/metrics.jsonl")
    assert LoggingConfig().metrics_path(None) is None
    config, _ = parse(["--no-metrics-file"])
    assert config.logging.metrics_path("runs/mine") is None


@pytest.mark.parametrize("has_folder", [True, False])
def test_nothing_of_a_run(tmp_path: Path, has_folder: bool) -> None:
    path = tmp_path if has_folder else tmp_path / "missing"
    with pytest.raises(
        UserError, match="no metrics of a run: train with --save, " if has_folder else "does not exist"
    ):
        open_run(path)


def _metrics(number: int, loss: float) -> IterationMetrics:
    record = iteration(number, 0.0, 0.0, lm_loss=loss)
    return IterationMetrics(
        **{name: value for name, value in record.items() if "_time" not in name or "ms" in name}
    )


def test_tensorboards_files_where_there_is_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two starts, the second of which makes iteration 2 again."""
    pytest.importorskip("tensorboard")
    for start, numbers in enumerate([(1, 2), (2, 3)]):
        monkeypatch.setattr("time.time", lambda start=start: 1000.0 + start)
        config = LoggingConfig(log_throughput=True, log_memory_to_tensorboard=True)
        writer = TensorBoardWriter(tmp_path / "board", config, 4, "model:\n  num_layers: 4\n")
        writer.start(numbers[0] - 1, 8 * (numbers[0] - 1))
        for number in numbers:
            writer.iteration(_metrics(number, loss=10.0 * start + number), {})
        writer.validation(ValidationMetrics(numbers[-1], 8, "valid", 4.5, "books"))
        writer.close()
    run = open_run(tmp_path)
    assert [(row.iteration, row.values["lm_loss"]) for row in run.history.iterations] == [
        (1, 1.0),
        (2, 12.0),
        (3, 13.0),
    ]
    assert run.history.iterations[0].values["tokens_per_second"] == 2048.0
    assert run.history.iterations[0].values["iteration_time_ms"] == pytest.approx(500.0)
    assert run.history.iterations[0].values["memory_reserved_mb"] == pytest.approx(40_000.0)
    assert [(row.name, row.iteration) for row in run.history.evaluations] == [("valid books", 3)]
    assert run.config == "model:\n  num_layers: 4"


@pytest.mark.parametrize("others", [1e-320, 5e-324, 0.0, 1.0, 1e308])
def test_figures_at_the_ends_of_a_floats_range_are_shown(tmp_path: Path, others: float) -> None:
    rows = [iteration(number, 0.0, 1.0) for number in range(1, 9)]
    for row in rows:
        row |= {"iteration_time_ms": 1e-320, "tokens_per_second": others, "wall_time": 1e-320}
    rows[4] |= {"iteration_time_ms": others, "lm_loss": others, "grad_norm": 1e-320}
    write_metrics(tmp_path / "metrics.jsonl", rows)
    assert ">iteration time<" in page([open_run(tmp_path)])


def test_an_evaluation_alone_is_no_run(tmp_path: Path) -> None:
    write_metrics(tmp_path / "m.jsonl", [evaluation(1, 0.0, 1.0, 3.0)])
    with pytest.raises(UserError, match="has no metrics of an iteration"):
        open_run(tmp_path)


def test_the_trace_of_the_latest_iterations(tmp_path: Path) -> None:
    folder = write_restarted_run(tmp_path)
    # The dates of a copy say nothing. PyTorch's profiler writes the last one.
    for name in ("pipeline_trace_10-10.json", "pipeline_trace_9-9.json", "run.99.pt.trace.json"):
        (folder / name).write_text("[]")
    assert open_run(folder).trace == folder / "pipeline_trace_10-10.json"


@pytest.mark.parametrize("suffix", ["json", "json.gz"])
def test_the_page_has_the_time_breakdown_of_the_trace(tmp_path: Path, suffix: str) -> None:
    folder = write_restarted_run(tmp_path)
    spans = [TraceSpan("iteration 5", "iteration", 1.0, 2.0)]
    file = folder / "pipeline_trace_5-5.json"
    write_trace(file, [Lane(0, {"pp": 0}, spans)], {"verdict_line": "compute 90%, <tp wait> 10%"})
    if suffix.endswith("gz"):
        file.with_suffix(".json.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    text = page([open_run(folder)])
    assert "<b>compute 90%, &lt;tp wait&gt; 10%</b>" in text and f"pipeline_trace_5-5.{suffix}" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2", "the trace cannot be read: "),
        ("[]", "the trace contains no time breakdown"),
        ('{"otherData": []}', "the trace contains no time breakdown"),
    ],
)
def test_a_file_that_only_has_the_name_of_a_trace(tmp_path: Path, text: str, message: str) -> None:
    file = write_restarted_run(tmp_path) / "trace.json"
    file.write_text(text)
    assert trace_summary(file).startswith(message)
    assert message in page([open_run(tmp_path)])
