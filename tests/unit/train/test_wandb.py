"""Test the calls of Weights & Biases, with a module in its place."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megalite.config import LoggingConfig
from megalite.distributed.topology import Topology
from megalite.errors import UserError
from megalite.train.telemetry.metrics import IterationMetrics, ValidationMetrics
from megalite.train.telemetry.timers import Timers
from megalite.train.telemetry.writers import Writers

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


def test_what_is_written(
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
    assert [step for step, _ in run.logged] == [100, 100, 100, 100]
    figures, norms, of_optimizer, validation = (scalars for _, scalars in run.logged)
    assert figures["lm loss"] == metrics.lm_loss
    assert figures["samples"] == 800
    assert figures["throughput"] == metrics.tflops_per_gpu
    assert norms == {"grad-norm by layer": (3.0,), "grad-norm by layer/layers.0": 3.0}
    assert of_optimizer == {"optimizer/momentum_l2": 2.5}
    assert validation == {"lm loss validation": 2.5}
    assert run.exit_code == 0


def test_a_failed_run_is_marked_as_failed(runs: list[Any], topology: Topology) -> None:
    with pytest.raises(ZeroDivisionError), Writers(LoggingConfig(wandb_project="gpt"), topology, CONFIG_TEXT):
        raise ZeroDivisionError
    assert runs[0][1].exit_code == 1


def test_its_folder_is_the_requested_one(runs: list[Any], topology: Topology, tmp_path: Path) -> None:
    config = LoggingConfig(wandb_project="gpt", wandb_save_dir=str(tmp_path / "own"))
    with Writers(config, topology, CONFIG_TEXT, str(tmp_path / "save")):
        assert runs[0][0]["dir"] == str(tmp_path / "own")
        assert (tmp_path / "own").is_dir()


def test_without_the_package(topology: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"--wandb-project gpt needs the package wandb.*: pip install wandb"):
        Writers(LoggingConfig(wandb_project="gpt"), topology, CONFIG_TEXT)
