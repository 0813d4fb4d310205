"""MLflow: the calls of a stand-in, and, where the library is installed, what it stores."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megalite.config import LoggingConfig
from megalite.distributed.topology import Topology
from megalite.train.telemetry.metrics import IterationMetrics, ValidationMetrics
from megalite.train.telemetry.timers import Timers
from megalite.train.telemetry.writers import Writers
from megalite.utils.errors import UserError

CONFIG = LoggingConfig(mlflow_experiment="gpt", log_interval=10)
CONFIG_TEXT = "model:\n" + "".join(f"  field_{number}: {number}\n" for number in range(130))


def _write(topology: Topology, metrics: IterationMetrics) -> None:
    with Writers(CONFIG, topology, CONFIG_TEXT) as writers:
        for interval in writers.intervals:
            writers.iteration(interval, metrics, Timers())
        writers.layer_norms(100, {"layers.0": 3.0})
        writers.scalars(100, {"optimizer/momentum_l2": 2.5})
        writers.validation(ValidationMetrics(100, 800, "valid", 2.5))


class Refusal(Exception):
    pass


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the calls of the stand-in, each with its name and arguments."""
    found: list[Any] = []

    def recorder(name: str) -> Any:
        return lambda *args, **kwargs: found.append((name, *args, kwargs))

    names = ["set_experiment", "start_run", "log_params", "log_metrics", "flush_async_logging", "end_run"]
    module = SimpleNamespace(
        **{name: recorder(name) for name in names}, exceptions=SimpleNamespace(MlflowException=Refusal)
    )
    monkeypatch.setitem(sys.modules, "mlflow", module)  # type: ignore[arg-type]
    return found


def test_calls(calls: list[Any], topology: Topology, metrics: IterationMetrics) -> None:
    _write(topology, metrics)
    names = [name for name, *_ in calls]
    assert names == (
        ["set_experiment", "start_run", "log_params", "log_params"]
        + ["log_metrics"] * 4
        + ["flush_async_logging", "end_run"]
    )
    assert calls[0][1] == "gpt"
    params = [call[1] for call in calls[2:4]]
    assert [len(part) for part in params] == [100, 30]
    assert params[1]["model.field_129"] == 129
    assert all(call[-1]["synchronous"] is False for call in calls[2:8])
    assert all(call[-1]["step"] == 100 for call in calls[4:8])
    figures, norms, of_optimizer, validation = (call[1] for call in calls[4:8])
    assert (figures["lm loss"], figures["samples"]) == (metrics.lm_loss, 800)
    assert norms == {"grad-norm by layer/layers.0": 3.0}
    assert of_optimizer == {"optimizer/momentum_l2": 2.5}
    assert validation == {"lm loss validation": 2.5}
    assert calls[-1][1] == "FINISHED"


def test_a_failed_run_is_marked(calls: list[Any], topology: Topology) -> None:
    with pytest.raises(ZeroDivisionError), Writers(CONFIG, topology, CONFIG_TEXT):
        raise ZeroDivisionError
    assert calls[-1][:2] == ("end_run", "FAILED")


def test_a_server_that_refuses_the_run(
    calls: list[Any], topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: str) -> None:
        raise Refusal("the experiment was deleted\nmore")

    monkeypatch.setattr(sys.modules["mlflow"], "set_experiment", refuse)
    with pytest.raises(UserError, match=r"--mlflow-experiment gpt cannot be .*: the experiment was deleted$"):
        Writers(CONFIG, topology, CONFIG_TEXT)


def test_without_the_package(topology: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UserError, match=r"--mlflow-experiment gpt needs the package mlflow.*: pip install"):
        Writers(CONFIG, topology, CONFIG_TEXT)


def test_what_mlflow_stores(
    topology: Topology, metrics: IterationMetrics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", exc_type=ImportError)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(tmp_path.as_uri())
    _write(topology, metrics)
    client = mlflow.MlflowClient(tmp_path.as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("gpt").experiment_id])
    assert run.info.status == "FINISHED"
    assert len(run.data.params) == 130
    (loss,) = client.get_metric_history(run.info.run_id, "lm loss")
    assert (loss.step, loss.value) == (100, metrics.lm_loss)
    assert run.data.metrics["lm loss validation"] == 2.5
