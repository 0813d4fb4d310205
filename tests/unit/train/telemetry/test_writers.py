"""Test the log lines, the metrics file, which rank opens which outputs, and how they fail."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import math
import os
import pty
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megalite.config import LoggingConfig, ParallelConfig
from megalite.distributed.topology import Topology
from megalite.frontends.command_line import parse
from megalite.train.setup import startup_line
from megalite.train.telemetry.metrics import ExpertUse, IterationMetrics, LayerLoads, ValidationMetrics
from megalite.train.telemetry.metrics_file import MetricsFile
from megalite.train.telemetry.time_terms import RankTime, sample_in, time_sample
from megalite.train.telemetry.timers import Timers
from megalite.train.telemetry.writers import (
    LogLineWriter,
    Writers,
    iteration_line,
    short_line,
    validation_block,
)
from megalite.train.trainer import LayoutChange
from megalite.utils.errors import UserError
from megalite.utils.log import configure_logging, log

PARALLEL = ParallelConfig(tensor_model_parallel_size=2)


@pytest.fixture
def config(tmp_path: Path) -> LoggingConfig:
    return LoggingConfig(
        metrics_file=str(tmp_path / "metrics.jsonl"), tensorboard_dir=str(tmp_path / "tensorboard")
    )


def _write(writers: Writers, metrics: IterationMetrics) -> Timers:
    timers = Timers()
    with timers("optimizer"):
        pass
    for interval in writers.intervals:
        writers.iteration(interval, metrics, timers)
    writers.validation(ValidationMetrics(100, 800, "valid", 2.5))
    return timers


def test_the_last_rank_writes_everything(
    config: LoggingConfig, tmp_path: Path, metrics: IterationMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="megalite")
    with Topology.fake(PARALLEL.mesh, 2, rank=1) as topology, Writers(config, topology, "") as writers:
        timers = _write(writers, metrics)
    assert timers.take() == {}
    assert [record.message.split()[0] for record in caplog.records] == ["iteration", "-" * 92]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert len(list((tmp_path / "tensorboard").glob("events*"))) == 1
    writers.close()  # once more does nothing


def test_a_run_that_has_lost_its_folder_writes_nothing(
    config: LoggingConfig, tmp_path: Path, metrics: IterationMetrics, lost_lease
) -> None:
    with (
        Topology.fake(PARALLEL.mesh, 2, rank=1) as topology,
        Writers(config, topology, "", lease=lost_lease) as writers,
    ):
        before = {file: file.stat().st_size for file in tmp_path.rglob("*")}
        _write(writers, metrics)
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert {file: file.stat().st_size for file in tmp_path.rglob("*")} == before


def test_tensorboard_has_an_interval_of_its_own(
    tmp_path: Path, topology: Topology, metrics: IterationMetrics
) -> None:
    """Test that the timers of a log line are in the next point of TensorBoard."""
    config = LoggingConfig(
        log_interval=20,
        tensorboard_log_interval=15,
        tensorboard_dir=str(tmp_path),
        log_timers_to_tensorboard=True,
    )
    timers = Timers(level=1)
    with Writers(config, topology, "") as writers:
        assert writers.intervals == (20, 15)
        for iteration in range(1, 61):
            with timers("optimizer"):
                pass
            for interval in writers.intervals:
                if iteration % interval == 0:
                    writers.iteration(interval, dataclasses.replace(metrics, iteration=iteration), timers)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("lm loss")] == [15, 30, 45, 60]
    assert [event.step for event in events.Scalars("optimizer-time")] == [30, 45, 60]


def test_without_dashboards_there_is_one_interval(topology: Topology) -> None:
    with Writers(LoggingConfig(log_interval=20), topology, "") as writers:
        assert writers.intervals == (20,)


def test_other_ranks_write_nothing(
    config: LoggingConfig,
    tmp_path: Path,
    metrics: IterationMetrics,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # nor do they need the package
    caplog.set_level(logging.INFO, logger="megalite")
    with Topology.fake(PARALLEL.mesh, 2, rank=0) as topology, Writers(config, topology, "") as writers:
        timers = _write(writers, metrics)
    assert timers.take() == {}
    assert not caplog.records
    assert not list(tmp_path.iterdir())


def test_an_output_that_cannot_be_opened_leaves_none_open(tmp_path: Path, topology: Topology) -> None:
    (tmp_path / "file").touch()
    config = LoggingConfig(
        metrics_file=str(tmp_path / "m.jsonl"), tensorboard_dir=str(tmp_path / "file" / "runs")
    )
    with pytest.raises(UserError, match="--tensorboard-dir"):
        Writers(config, topology, "")


GOLDEN = (
    " iteration      100/     100 | consumed samples:          800 | elapsed time per iteration (ms): 537.3 |"
    " learning rate: 5.822E-05 | global batch size:     8 | lm loss: 7.448950E+00 | loss scale: 1.0 |"
    " grad norm: 1.303 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)


def test_line_of_an_iteration(metrics: IterationMetrics) -> None:
    assert iteration_line(metrics, LoggingConfig()) == GOLDEN


def test_throughput_follows_the_elapsed_time(metrics: IterationMetrics) -> None:
    before, elapsed, after = GOLDEN.partition(" elapsed time per iteration (ms): 537.3 |")
    expected = f"{before}{elapsed} throughput per GPU (TFLOP/s/GPU): 117.7 |{after}"
    assert iteration_line(metrics, LoggingConfig(log_throughput=True)) == expected


def test_optional_fields_follow_the_grad_norm(metrics: IterationMetrics) -> None:
    before, norm, after = GOLDEN.partition(" grad norm: 1.303 |")
    further = dataclasses.replace(metrics, num_zeros=0, params_norm=12.345)
    expected = f"{before}{norm} num zeros: 0 | params norm: 12.345 |{after}"
    assert iteration_line(further, LoggingConfig()) == expected


def test_the_decoupled_rate_follows_the_learning_rate(metrics: IterationMetrics) -> None:
    before, rate, after = GOLDEN.partition(" learning rate: 5.822E-05 |")
    expected = f"{before}{rate} decoupled learning rate: 4.500E-05 |{after}"
    decoupled = dataclasses.replace(metrics, decoupled_learning_rate=4.5e-5)
    assert iteration_line(decoupled, LoggingConfig()) == expected


def test_the_fields_of_blooms_logs(metrics: IterationMetrics) -> None:
    """They stand where Megatron-DeepSpeed has them; --deepspeed requests them."""
    config, _ = parse(["--deepspeed"])
    metrics = dataclasses.replace(metrics, consumed_tokens=800 * 1024, tokens_per_second=15_246.6)
    before, elapsed, after = GOLDEN.partition(" elapsed time per iteration (ms): 537.3 |")
    expected = (
        f"{before} consumed tokens:       819200 |{elapsed}{after}"
        " samples per second: 14.889 | TFLOPs: 117.70 |"
    )
    assert iteration_line(metrics, config.logging) == expected


@pytest.mark.parametrize(("loss", "shown"), [(math.nan, "NAN"), (math.inf, "INF"), (-math.inf, "-INF")])
def test_a_loss_that_is_no_number_is_shown(metrics: IterationMetrics, loss: float, shown: str) -> None:
    line = iteration_line(dataclasses.replace(metrics, lm_loss=loss), LoggingConfig())
    assert f" lm loss: {shown} |" in line


def test_a_terminal_gets_a_short_line(metrics: IterationMetrics) -> None:
    running = dataclasses.replace(metrics, train_iters=2500, tokens_per_second=15_246.6)
    line = "step  100/2500 | loss 7.4489 | 15,247 tokens/s"
    assert short_line(running, LoggingConfig()) == f"{line} | 21:30 left"  # 2400 iterations of 537.3 ms
    logged = LoggingConfig(log_throughput=True)
    assert short_line(running, logged) == f"{line} | 117.7 TFLOP/s per GPU | 21:30 left"
    for train_iters, left in ((100, "0:00"), (20_100, "2:59:06"), (1_000_100, "6d 05:15:00")):
        text = short_line(dataclasses.replace(running, train_iters=train_iters), LoggingConfig())
        assert text.endswith(f" | {left} left")
    broken = dataclasses.replace(
        running,
        lm_loss=math.nan,
        num_nan=2,
        num_skipped=1,
        params_norm=12.345,
        num_zeros=3,
        other_losses={"sop_loss": 0.6931},
    )
    shown = "loss nan | sop loss 0.6931 | 3 zeros in the gradient | params norm 12.345 | 1 skipped | 2 nan |"
    assert shown in short_line(broken, LoggingConfig())


@pytest.mark.parametrize(
    ("flags", "on_terminal", "in_file"),
    [
        ("", "step ", " iteration "),
        ("--log-line short", "step ", "step "),
        ("--log-format megatron", " iteration ", " iteration "),
        ("--deepspeed", " iteration ", " iteration "),
    ],
)
def test_the_line_is_short_on_a_terminal_and_megatrons_in_a_file(
    metrics: IterationMetrics, flags: str, on_terminal: str, in_file: str
) -> None:
    config, _ = parse(flags.split())
    main, terminal = pty.openpty()
    for stream, start in ((os.fdopen(terminal, "w"), on_terminal), (io.StringIO(), in_file)):
        configure_logging(rank=0, stream=stream)
        LogLineWriter(config.logging).iteration(metrics, {})
        stream.flush()
        text = stream.getvalue() if isinstance(stream, io.StringIO) else os.read(main, 1000).decode()
        assert text.startswith(start)
        assert "step" in start or config.logging.log_line == "megatron-deepspeed" or GOLDEN in text
    os.close(main)


def test_the_rate_of_a_cpu_is_not_zero(metrics: IterationMetrics) -> None:
    slow = dataclasses.replace(metrics, tflops_per_gpu=0.0123)
    logged = LoggingConfig(log_throughput=True)
    assert " throughput per GPU (TFLOP/s/GPU): 0.0123 |" in iteration_line(slow, logged)
    assert " | 0.0123 TFLOP/s per GPU | " in short_line(slow, logged)
    assert " TFLOPs: 0.0123 |" in iteration_line(slow, LoggingConfig(log_line="megatron-deepspeed"))


def test_lines_of_a_validation() -> None:
    line = "validation loss at iteration 40 | lm loss value: 7.416743E+00 | lm loss PPL: 1.663606E+03 |"
    block = validation_block(ValidationMetrics(40, 320, "valid", 7.416743))
    assert block.splitlines() == ["-" * len(line), line, "-" * len(line)]
    test_line = validation_block(ValidationMetrics(40, 320, "test", math.nan)).splitlines()[1]
    assert test_line == (
        "validation loss at iteration 40 on test set | lm loss value: NAN | lm loss PPL: NAN |"
    )

    named = validation_block(ValidationMetrics(40, 320, "valid", 7.416743, "ARABIC")).splitlines()[1]
    assert named.startswith("validation loss at iteration 40 on ARABIC | lm loss value: 7.416743E+00 |")
    averaged = ValidationMetrics(40, 320, "test", 7.416743, "ARABIC", is_of_average=True)
    assert (
        validation_block(averaged)
        .splitlines()[1]
        .startswith(
            "validation loss at iteration 40 on test set on ARABIC with EMA weights | lm loss value: 7.41"
        )
    )


def test_line_at_startup() -> None:
    parallel = ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    with Topology.fake(parallel.mesh, world_size=4, rank=3) as topology:
        assert startup_line(topology) == (
            "using world size: 4, data-parallel-size: 1, "
            "tensor-model-parallel size: 2, pipeline-model-parallel size: 2"
        )


def test_any_rank_prints_it_as_it_is(metrics: IterationMetrics, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(rank=3)
    log.info("for rank 0 to say")
    broken = dataclasses.replace(metrics, warnings=("iteration 98: the loss is nan; the update was skipped",))
    LogLineWriter(LoggingConfig()).iteration(broken, {})
    assert capsys.readouterr().out.splitlines() == [
        "warning: iteration 98: the loss is nan; the update was skipped",
        GOLDEN,
    ]


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
    sample = time_sample(
        3, 1, [RankTime(0, "host", {"pp": 0}, {"compute": 1 / 9})], {"pp": 1}, {"saving": 0.5}, lambda _: 0.0
    )
    optional = {"params_norm": 1 / 7, "num_zeros": 0, "decoupled_learning_rate": 1e-3}
    absent = {"warnings", "other_losses", "time_breakdown", *optional}
    assert record == {key: value for key, value in dataclasses.asdict(exact).items() if key not in absent}
    terms = {"router_loss": 0.7}
    exact = dataclasses.replace(exact, **optional, other_losses=terms, time_breakdown=sample)
    writer.iteration(exact, {})
    assert sample_in(_read(path)[1]["time_breakdown"]) == sample
    assert {name: _read(path)[1][name] for name in (*optional, *terms)} == optional | terms


def test_metrics_of_a_validation(tmp_path: Path) -> None:
    writer = MetricsFile(tmp_path / "metrics.jsonl")
    writer.validation(ValidationMetrics(40, 320, "valid", 2.5))
    writer.validation(ValidationMetrics(40, 320, "valid", 2.25, is_of_average=True))
    writer.close()
    record, averaged = _read(tmp_path / "metrics.jsonl")
    assert (averaged["validation"]["weights"], averaged["validation"]["lm_loss"]) == ("ema", 2.25)
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


def test_the_loads_of_experts_are_in_all_outputs(
    config: LoggingConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="megalite")
    loads = ExpertUse(
        7, 56, {"layers.1": LayerLoads((6, 2, 1), 0.5, dropped=2), "mtp.0": LayerLoads((3, 3, 3), 1.0)}
    )
    with Topology.fake(PARALLEL.mesh, 2, rank=1) as topology, Writers(config, topology, "") as writers:
        writers.expert_use(loads)
    assert caplog.messages == ["experts at iteration 7 | largest load above the mean: 100.0% in layers.1 |"]
    (line,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert line["experts"] == {
        "iteration": 7,
        "consumed_samples": 56,
        "layers": {
            "layers.1": {"tokens": [6, 2, 1], "max_violation": 1.0, "entropy": 0.5, "dropped": 2},
            "mtp.0": {"tokens": [3, 3, 3], "max_violation": 0.0, "entropy": 1.0, "dropped": 0},
        },
    }
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (event,) = events.Scalars("experts/layers.1 max violation")
    assert (event.step, event.value) == (7, 1.0)
    (histogram,) = events.Histograms("tokens of experts by layer/layers.1")
    assert (histogram.histogram_value.num, histogram.histogram_value.sum) == (3, 9)


def test_a_change_of_the_layout_is_in_all_outputs(config: LoggingConfig, tmp_path: Path) -> None:
    change = LayoutChange("pp 2 dp 1 tp 1", "tp2+sp", 0.5, 3000)
    with Topology.fake(PARALLEL.mesh, 2, rank=1) as topology, Writers(config, topology, "") as writers:
        writers.layout_change(7, change._asdict())
    (line,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert line["layout_change"] == {
        **{"iteration": 7, "before": "pp 2 dp 1 tp 1", "after": "tp2+sp"},
        **{"seconds": 0.5, "num_bytes": 3000, "num_lost": 0, "num_repeated": 0},
    }
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    for name, value in (("seconds", 0.5), ("bytes", 3000.0)):
        (event,) = events.Scalars(f"layout change/{name}")
        assert (event.step, event.value) == (7, value)
