"""Runs that are told to stop: by signals, by the kill switch; and what a scheduler sees of it."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megalite.cli import train
from megalite.config import CheckpointConfig
from megalite.train import stopping
from megalite.train.loop import _how_to_resume
from megalite.train.stopping import StopSignals
from megalite.train.train_step import StepResult
from megalite.train.trainer import Trainer
from megalite.utils.log import log
from tests.end_to_end.conftest import TINY_FLAGS, RunHere, signals_restored

FLAGS = ("--train-iters", "12", "--lr", "0.01", "--eval-iters", "0", "--num-threads", "1")
AfterStep = Callable[[int, Callable[[], object]], None]


@pytest.fixture
def after_step(monkeypatch: pytest.MonkeyPatch) -> AfterStep:
    """Does something once at the end of the step of an iteration."""
    step, planned = Trainer.step, dict[int, Callable[[], object]]()

    def watched_step(trainer: Trainer, **options: bool) -> StepResult:
        result = step(trainer, **options)
        planned.pop(trainer.progress.iteration, lambda: None)()
        return result

    monkeypatch.setattr(Trainer, "step", watched_step)
    monkeypatch.setattr(stopping, "CHECK_SECONDS", 1e-6)  # after every iteration, however short
    return planned.__setitem__


def _losses(path: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, path.read_text().splitlines())
    return [(line["iteration"], line["lm_loss"]) for line in lines if "iteration" in line]


def _send(number: signal.Signals) -> Callable[[], None]:
    """Return what sends a signal and waits until the run has noticed it."""

    def send() -> None:
        is_noticed, notice = threading.Event(), StopSignals.notice

        def noticed(signals: StopSignals, name: str) -> None:
            notice(signals, name)
            is_noticed.set()

        with mock.patch.object(StopSignals, "notice", noticed):
            os.kill(os.getpid(), number)
            assert is_noticed.wait(300.0)

    return send


def _folders(folder: Path) -> list[str]:
    return ["--save", str(folder), "--load", str(folder), "--metrics-file", str(folder / "m.jsonl")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_asks_to_be_run_again(
    pretrain_here: RunHere, after_step: AfterStep, tmp_path: Path, number: signal.Signals
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert pretrain_here(*FLAGS, *_folders(whole))[0] == 0
    after_step(3, _send(number))
    status, _ = pretrain_here(*FLAGS, *_folders(parts))
    last = int((parts / "latest").read_text().strip().removeprefix("iter_"))
    assert (status, 3 <= last < 12) == (75, True)
    assert (parts / "requeue").read_text() == f"after iteration {last}: received {number.name}\n"
    assert pretrain_here(*FLAGS, *_folders(parts))[0] == 0
    assert not (parts / "requeue").exists()
    assert _losses(parts / "m.jsonl") == _losses(whole / "m.jsonl")


def test_a_signal_after_the_end_does_not_change_the_status(after_step: AfterStep, corpus: str) -> None:
    after_step(2, _send(signal.SIGTERM))
    with signals_restored():
        with pytest.raises(SystemExit) as end:
            train.main([*TINY_FLAGS, *FLAGS, "--data-path", corpus])
        handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert (end.value.code, handlers) == (75, [signal.SIG_IGN, signal.SIG_IGN])


def test_ctrl_c_saves_and_asks_for_nothing(
    pretrain_here: RunHere, after_step: AfterStep, tmp_path: Path
) -> None:
    after_step(2, _send(signal.SIGINT))
    assert pretrain_here(*FLAGS, *_folders(tmp_path))[0] == 130
    assert (tmp_path / "latest").exists()
    assert not (tmp_path / "requeue").exists()


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"load": "runs/a", "save": "runs/a"}, "to resume, run the same command again"),
        ({"save": "runs/a"}, "to resume, run the same command with --load runs/a"),
        (
            {"load": "b", "save": "runs/a", "finetune": True},
            "to resume, run the same command with --load runs/a and without --finetune",
        ),
    ],
)
def test_a_stopped_run_says_how_to_resume(flags: dict[str, Any], told: str) -> None:
    assert _how_to_resume(CheckpointConfig(**flags)) == told


def test_a_signal_without_a_folder_says_that_nothing_is_saved(
    pretrain_here: RunHere, after_step: AfterStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(log, "warning", lambda text, *values: warnings.append(text % values))
    after_step(2, _send(signal.SIGTERM))
    assert pretrain_here(*FLAGS)[0] == 75
    assert warnings[-1] == "nothing is saved: there is no --save folder"


def test_a_signal_breaks_an_evaluation_off(
    pretrain_here: RunHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = Trainer.evaluate

    def signalled(trainer: Trainer, *args: Any, **options: Any) -> float:
        _send(signal.SIGTERM)()
        return evaluate(trainer, *args, **options)

    monkeypatch.setattr(Trainer, "evaluate", signalled)
    flags = ["--train-iters", "12", "--eval-iters", "10000", "--eval-interval", "2"]
    assert pretrain_here(*flags, *_folders(tmp_path))[0] == 75
    assert (tmp_path / "latest").read_text() == "iter_0000002\n"
    assert "validation" not in (tmp_path / "m.jsonl").read_text()


def test_an_early_end_that_was_asked_for_is_no_failure(pretrain_here: RunHere, tmp_path: Path) -> None:
    assert pretrain_here(*FLAGS, *_folders(tmp_path), "--exit-interval", "5")[0] == 0
    words = "after iteration 5: iteration 5 is a multiple of --exit-interval 5\n"
    assert (tmp_path / "requeue").read_text() == words


def test_the_kill_switch(pretrain_here: RunHere, after_step: AfterStep, tmp_path: Path) -> None:
    switch = tmp_path / "switch"
    flags = [*FLAGS, *_folders(tmp_path / "run"), "--kill-switch-path", str(switch)]
    after_step(2, switch.touch)
    assert pretrain_here(*flags)[0] == 0
    saved = (tmp_path / "run" / "latest").read_text()
    assert saved < "iter_0000012"
    assert not (tmp_path / "run" / "requeue").exists()
    assert pretrain_here(*flags)[0] == 0  # and does not start again
    assert (tmp_path / "run" / "latest").read_text() == saved
    switch.unlink()
    assert pretrain_here(*flags)[0] == 0
    assert (tmp_path / "run" / "latest").read_text() == "iter_0000012\n"
