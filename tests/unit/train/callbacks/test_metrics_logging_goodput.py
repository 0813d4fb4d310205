"""The share of a run's time in iterations that count, by a clock that the test sets."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from megalite.config import CheckpointConfig
from megalite.train.callbacks import metrics_logging
from megalite.train.callbacks.metrics_logging import Goodput


def test_iterations_that_ran_again_do_not_count(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Iterations of 10 s: the second one is saved, and the third is lost, and runs again later."""
    clock = SimpleNamespace(now=1000.0)
    shown: list[dict[str, float]] = []
    writers: Any = SimpleNamespace(scalars=lambda _, values: shown.append(values))
    read = {name: lambda: clock.now for name in ("time", "monotonic", "perf_counter")}
    monkeypatch.setattr(metrics_logging, "time", SimpleNamespace(**read))

    def at(start: float, loads: str = "runs/a") -> Any:
        config = SimpleNamespace(checkpoint=CheckpointConfig(save="runs/a", load=loads))
        return SimpleNamespace(
            iteration=0,
            stop_conditions=SimpleNamespace(signals=SimpleNamespace(start=start)),
            trainer=SimpleNamespace(config=config),
        )

    def step(callback: Goodput, loop: Any) -> None:
        callback.before_step(loop)
        clock.now += 10.0
        callback.after_step(loop, Any)
        clock.now += 5.0

    first, again, began_at = Goodput(writers), Goodput(writers), 980.0
    first.on_start(loop := at(began_at))
    step(first, loop)
    step(first, loop)
    first.on_save(loop)
    assert shown == [{"goodput": 20 / 50}]
    saved = first.state()
    step(first, loop)
    clock.now = 1100.0
    again.load_state(saved)
    again.on_start(loop := at(1095.0))
    step(again, loop)
    with caplog.at_level(logging.INFO):
        again.on_end(loop)
    assert f"goodput: {100 * 30 / (1115 - began_at):.1f}% of the 2:15 since the first start" in caplog.text
    another = Goodput(writers)
    another.load_state(saved)
    another.on_start(at(1095.0, loads="runs/b"))
    assert another.state() == {"began_at": 1095.0, "trained_seconds": 0.0}
