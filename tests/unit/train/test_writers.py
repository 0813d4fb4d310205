"""Test which rank opens which outputs, and how they fail."""

from __future__ import annotations

import dataclasses
import logging
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megalite.config import LoggingConfig, ParallelConfig
from megalite.distributed.topology import Topology
from megalite.errors import UserError
from megalite.train.telemetry.metrics import IterationMetrics, ValidationMetrics
from megalite.train.telemetry.timers import Timers
from megalite.train.telemetry.writers import Writers

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
    with Topology.fake(PARALLEL, 2, rank=1) as topology, Writers(config, topology, "") as writers:
        timers = _write(writers, metrics)
    assert timers.take() == {}
    assert [record.message.split()[0] for record in caplog.records] == ["iteration", "-" * 92]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
    writers.close()  # once more does nothing


def test_a_run_that_has_lost_its_folder_writes_nothing(
    config: LoggingConfig, tmp_path: Path, metrics: IterationMetrics, lost_lease
) -> None:
    with (
        Topology.fake(PARALLEL, 2, rank=1) as topology,
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
    with Topology.fake(PARALLEL, 2, rank=0) as topology, Writers(config, topology, "") as writers:
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
