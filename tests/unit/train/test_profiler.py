"""The trace that a profiled run leaves behind."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from megalite.config import LoggingConfig
from megalite.errors import UserError
from megalite.topology import Topology
from megalite.train.profiler import profiler


def _run(config: LoggingConfig, topology: Topology, num_iterations: int) -> None:
    with profiler(config, topology) as profile:
        for iteration in range(1, num_iterations + 1):
            with torch.profiler.record_function(f"iteration {iteration}"):
                torch.ones(8, 8) @ torch.ones(8, 8)
            profile.step()


def test_three_iterations_are_traced_after_two(
    tmp_path: Path, topology: Topology, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="megalite")
    config = LoggingConfig(tensorboard_dir=str(tmp_path), profile_execution=True, profile_name="TP_PP")
    _run(config, topology, 8)
    assert [record.message for record in caplog.records] == [
        f"profiler: the trace is in {tmp_path / 'TP_PP'}"
    ]
    (trace,) = (tmp_path / "TP_PP").iterdir()
    assert trace.name.startswith("rank0.")
    assert trace.name.endswith(".pt.trace.json")
    names = {event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {name for name in names if name.startswith("iteration ")} == {f"iteration {n}" for n in (3, 4, 5)}
    assert "aten::mm" in names


def test_off_it_does_nothing(tmp_path: Path, topology: Topology) -> None:
    _run(LoggingConfig(tensorboard_dir=str(tmp_path)), topology, 8)
    assert not list(tmp_path.iterdir())


def test_a_run_too_short_for_a_trace_says_so(
    tmp_path: Path, topology: Topology, caplog: pytest.LogCaptureFixture
) -> None:
    config = LoggingConfig(tensorboard_dir=str(tmp_path), profile_execution=True)
    with caplog.at_level(logging.WARNING, logger="megalite"):
        _run(config, topology, 1)
    assert [record.message for record in caplog.records] == [
        "--profile-execution: no trace, as the run had no iteration 3"
    ]


def test_a_folder_that_cannot_be_written(tmp_path: Path, topology: Topology) -> None:
    (tmp_path / "name").touch()
    config = LoggingConfig(tensorboard_dir=str(tmp_path), profile_execution=True, profile_name="name")
    with pytest.raises(UserError, match="cannot be written"):
        _run(config, topology, 1)
