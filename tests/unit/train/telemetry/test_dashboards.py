"""Test TensorBoard's file as TensorBoard reads it, and the calls of Weights & Biases."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megalite.config import LoggingConfig
from megalite.distributed.topology import Topology
from megalite.train.telemetry.dashboards import SAMPLES, TensorBoardWriter, validation_scalars
from megalite.train.telemetry.metrics import IterationMetrics, ValidationMetrics
from megalite.train.telemetry.timers import Timers
from megalite.train.telemetry.writers import Writers
from megalite.utils.errors import UserError

TIMERS = {"forward-backward": {0: 300.0, 1: 400.0}, "optimizer": {1: 20.0}}
ALWAYS = {"lm loss", "learning-rate", "grad-norm", "loss-scale", "iteration-time", "world-size"}
TWINS = {"lm loss vs samples", "learning-rate vs samples", "grad-norm vs samples", "loss-scale vs samples"}


def _written(
    folder: Path, config: LoggingConfig, metrics: IterationMetrics
) -> tuple[EventAccumulator, EventAccumulator]:
    """Return the scalars by iteration and those by samples."""
    writer = TensorBoardWriter(folder, config, 4, "model:\n  num_layers: 2\n")
    writer.start(0, 0)
    writer.iteration(metrics, TIMERS)
    writer.validation(ValidationMetrics(100, 800, "valid", 2.5))
    writer.validation(ValidationMetrics(100, 800, "test", 2.75))
    writer.close()
    return EventAccumulator(str(folder)).Reload(), EventAccumulator(str(folder / SAMPLES)).Reload()


def _scalar(events: EventAccumulator, tag: str) -> tuple[int, float]:
    (event,) = events.Scalars(tag)
    return event.step, event.value


def test_averages_have_their_own_tags() -> None:
    config = LoggingConfig(log_validation_ppl_to_tensorboard=True)
    averaged = ValidationMetrics(100, 800, "valid", 2.5, "books", {"z_loss": 0.5}, is_of_average=True)
    assert validation_scalars(config, averaged) == {
        "lm-loss-validation/books/lm loss validation ema": 2.5,
        "lm-loss-validation/books/lm loss validation ema ppl": math.exp(2.5),
        "lm-loss-validation/books/z loss validation ema": 0.5,
    }


def test_names_by_default(tmp_path: Path, metrics: IterationMetrics) -> None:
    events, by_samples = _written(tmp_path, LoggingConfig(), metrics)
    assert set(events.Tags()["scalars"]) == ALWAYS | {"lm loss validation", "lm loss test"}
    assert set(by_samples.Tags()["scalars"]) == TWINS


def test_each_flag_adds_its_scalars(tmp_path: Path, metrics: IterationMetrics) -> None:
    config = LoggingConfig(
        log_throughput=True,
        log_timers_to_tensorboard=True,
        log_batch_size_to_tensorboard=True,
        log_validation_ppl_to_tensorboard=True,
        log_memory_to_tensorboard=True,
    )
    metrics = dataclasses.replace(metrics, params_norm=12.5, num_zeros=3, mfu=0.4)
    events, by_samples = _written(tmp_path, config, metrics)
    added = set(events.Tags()["scalars"]) - ALWAYS - {"lm loss validation", "lm loss test"}
    assert added == {
        "throughput",
        "tokens-per-second",
        "mfu",
        "forward-backward-time",
        "optimizer-time",
        "batch-size",
        "lm loss validation ppl",
        "lm loss test ppl",
        "params-norm",
        "num-zeros",
        "mem-allocated-bytes",
        "mem-reserved-bytes",
    }
    more = {"batch-size vs samples", "params-norm vs samples", "num-zeros vs samples"}
    assert set(by_samples.Tags()["scalars"]) == TWINS | more
    assert _scalar(events, "params-norm") == (100, 12.5)
    assert _scalar(by_samples, "num-zeros vs samples") == (800, 3.0)
    assert _scalar(events, "mem-allocated-bytes") == (100, 1.5 * 2**20)
    assert _scalar(events, "forward-backward-time") == (100, pytest.approx(0.4))
    assert _scalar(by_samples, "batch-size vs samples") == (800, 8.0)
    assert _scalar(events, "throughput") == (100, pytest.approx(117.7))
    assert _scalar(events, "tokens-per-second") == (100, pytest.approx(15246.6))
    assert _scalar(events, "mfu") == (100, pytest.approx(0.4))
    assert _scalar(events, "lm loss validation ppl") == (100, pytest.approx(math.exp(2.5)))


def test_values_and_steps(tmp_path: Path, metrics: IterationMetrics) -> None:
    events, by_samples = _written(tmp_path, LoggingConfig(), metrics)
    assert _scalar(events, "lm loss") == (100, pytest.approx(7.44895))
    assert _scalar(by_samples, "lm loss vs samples") == (800, pytest.approx(7.44895))
    assert _scalar(events, "learning-rate") == (100, pytest.approx(5.822e-5))
    assert _scalar(events, "iteration-time") == (100, pytest.approx(0.5373))  # seconds
    assert _scalar(events, "world-size") == (100, 4.0)
    assert _scalar(events, "lm loss validation") == (100, 2.5)
    assert _scalar(events, "lm loss test") == (100, 2.75)
    assert b"  num_layers: 2" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]


def test_norms_of_layers(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path, LoggingConfig(), 1, "")
    writer.layer_norms(7, {"embedding": 1.0, "layers.0": 3.0})
    writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (histogram,) = events.Histograms("grad-norm by layer")
    assert (histogram.step, histogram.histogram_value.num, histogram.histogram_value.sum) == (7, 2, 4)
    assert _scalar(events, "grad-norm by layer/layers.0") == (7, 3.0)


def test_numbers_by_their_tags(tmp_path: Path) -> None:
    writer = TensorBoardWriter(tmp_path, LoggingConfig(), 1, "")
    writer.scalars(7, {"optimizer/momentum_l2": 2.5})
    writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert _scalar(events, "optimizer/momentum_l2") == (7, 2.5)


def test_a_nan_is_written(tmp_path: Path, metrics: IterationMetrics) -> None:
    events, _ = _written(tmp_path, LoggingConfig(), dataclasses.replace(metrics, lm_loss=math.nan))
    assert math.isnan(_scalar(events, "lm loss")[1])


def test_queue_size(tmp_path: Path, metrics: IterationMetrics) -> None:
    """Test the limit of held events; an iteration has ten of them."""
    writer = TensorBoardWriter(tmp_path, LoggingConfig(tensorboard_queue_size=20), 4, "")
    (file,) = tmp_path.glob("events*")
    sizes = []
    for _ in range(4):
        writer.iteration(metrics, {})
        sizes.append(file.stat().st_size)
    assert 0 < sizes[0] < sizes[1] == sizes[2] < sizes[3]
    writer.validation(ValidationMetrics(100, 800, "valid", 2.5))  # it waits for nothing
    assert file.stat().st_size > sizes[3]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--tensorboard-dir .*/file/runs cannot be written"):
        TensorBoardWriter(tmp_path / "file" / "runs", LoggingConfig(), 4, "")


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UserError, match="pip install tensorboard"):
        TensorBoardWriter(tmp_path / "runs", LoggingConfig(), 4, "")
    assert not (tmp_path / "runs").exists()


def test_a_run_without_tensorboard_needs_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    spec = importlib.util.find_spec("megalite.train.telemetry.dashboards")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


CONFIG_TEXT = "model:\n  num_layers: 2\n"


class Run:
    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.exit_code: int | None = None

    def log(self, scalars: dict[str, Any], step: int) -> None:
        self.logged.append((step, scalars))

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], Run]]:
    """Return the arguments and the object of each started run."""
    started: list[tuple[dict[str, Any], Run]] = []

    def init(**arguments: Any) -> Run:
        started.append((arguments, Run()))
        return started[-1][1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Histogram=tuple))  # type: ignore[arg-type]
    return started


def test_calls_of_wandb(
    runs: list[tuple[dict[str, Any], Run]], topology: Topology, metrics: IterationMetrics, tmp_path: Path
) -> None:
    config = LoggingConfig(wandb_project="gpt", wandb_exp_name="first", log_throughput=True, log_interval=10)
    with Writers(config, topology, CONFIG_TEXT, str(tmp_path / "save")) as writers:
        for interval in writers.intervals:
            writers.iteration(interval, metrics, Timers())
        writers.layer_norms(100, {"layers.0": 3.0})
        writers.scalars(100, {"optimizer/momentum_l2": 2.5})
        writers.validation(ValidationMetrics(100, 800, "valid", 2.5))
    ((arguments, run),) = runs
    assert arguments == {
        "project": "gpt",
        "name": "first",
        "dir": str(tmp_path / "save"),
        "config": {"model": {"num_layers": 2}},
    }
    assert [step for step, _ in run.logged] == [100, 100, 100, 100, 100]
    figures, norms, of_layers, of_optimizer, validation = (scalars for _, scalars in run.logged)
    assert figures["lm loss"] == metrics.lm_loss
    assert figures["samples"] == 800
    assert figures["throughput"] == metrics.tflops_per_gpu
    assert norms == {"grad-norm by layer": (3.0,)}
    assert of_layers == {"grad-norm by layer/layers.0": 3.0}
    assert of_optimizer == {"optimizer/momentum_l2": 2.5}
    assert validation == {"lm loss validation": 2.5}
    assert run.exit_code == 0


def test_wandb_marks_a_failed_run(runs: list[Any], topology: Topology) -> None:
    with pytest.raises(ZeroDivisionError), Writers(LoggingConfig(wandb_project="gpt"), topology, CONFIG_TEXT):
        raise ZeroDivisionError
    assert runs[0][1].exit_code == 1


def test_wandbs_folder_is_the_requested_one(runs: list[Any], topology: Topology, tmp_path: Path) -> None:
    config = LoggingConfig(wandb_project="gpt", wandb_save_dir=str(tmp_path / "own"))
    with Writers(config, topology, CONFIG_TEXT, str(tmp_path / "save")):
        assert runs[0][0]["dir"] == str(tmp_path / "own")
        assert (tmp_path / "own").is_dir()


def test_without_wandbs_package(topology: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"--wandb-project gpt needs the package wandb.*: pip install wandb"):
        Writers(LoggingConfig(wandb_project="gpt"), topology, CONFIG_TEXT)
