"""The hooks of the training loop: their order, a user's own stop, and the clean-up after an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from megalite.config import CheckpointConfig, Config, DataConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.distributed.topology import Topology
from megalite.train.callbacks import default_callbacks
from megalite.train.loop import Callback, TrainingLoop, train
from megalite.train.stopping import RequeueNote, Stop, StopConditions, StopSignals
from megalite.train.telemetry.metrics import ValidationMetrics
from megalite.train.telemetry.writers import Writers
from megalite.train.train_step import StepResult
from megalite.train.trainer import start_trainer


class Recorder(Callback):
    """Notes each hook that is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_start(self, loop: TrainingLoop) -> None:
        self.calls.append(f"start at {loop.iteration}")

    def before_step(self, loop: TrainingLoop) -> None:
        self.calls.append(f"before {loop.next_iteration}")

    def after_step(self, loop: TrainingLoop, result: StepResult) -> None:
        assert result.plan.iteration == loop.iteration
        self.calls.append(f"after {loop.iteration}")

    def after_iteration(self, loop: TrainingLoop, result: StepResult) -> None:
        self.calls.append(f"between {loop.iteration} and {loop.next_iteration}")

    def on_evaluation(self, loop: TrainingLoop, metrics: ValidationMetrics) -> None:
        self.calls.append(f"{metrics.split} at {metrics.iteration}")

    def on_save(self, loop: TrainingLoop) -> None:
        self.calls.append(f"save at {loop.iteration}")

    def on_end(self, loop: TrainingLoop) -> None:
        self.calls.append(f"end at {loop.iteration}")


class StopAtLoss(Callback):
    """Stops the run once the loss is low enough."""

    def __init__(self, loss: float) -> None:
        self.loss = loss

    def after_step(self, loop: TrainingLoop, result: StepResult) -> None:
        if result.loss < self.loss:
            loop.request_stop(Stop(f"the loss is below {self.loss}"))


class OneMinuteIterations(Callback):
    """Lets each iteration take a minute more."""

    def before_step(self, loop: TrainingLoop) -> None:
        loop.stop_conditions.signals.start -= 60.0


def _run(
    topology: Topology,
    callbacks: list[Callback],
    folder: Path | None = None,
    *,
    save_interval: int | None = 1,
    save_interval_minutes: float | None = None,
    **training: int,
) -> int:
    config = Config(
        model=replace(PRESETS["gpt-tiny"], vocab_size=64, seq_length=16),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(
            **{"global_batch_size": 2, "micro_batch_size": 1, "train_iters": 2, "eval_iters": 1, **training}
        ),
        checkpoint=CheckpointConfig(
            save=str(folder) if folder else None,
            save_interval=save_interval,
            save_interval_minutes=save_interval_minutes,
        ),
    )
    stop_conditions = StopConditions(config.training, topology, StopSignals(RequeueNote(None)))
    with Writers(config.logging, topology, "") as writers, start_trainer(config, topology) as trainer:
        return train(trainer, stop_conditions, [*callbacks, *default_callbacks(writers)])


def test_hooks_are_called_in_order(one_rank: Topology, tmp_path: Path) -> None:
    recorder = Recorder()
    assert _run(one_rank, [recorder], tmp_path, eval_interval=1) == 0
    assert recorder.calls == [
        "start at 0",
        *("before 1", "after 1", "between 1 and 2", "valid at 1", "save at 1"),
        *("before 2", "after 2", "between 2 and 3", "valid at 2", "save at 2"),
        "test at 2",
        "end at 2",
    ]


@pytest.mark.parametrize(
    ("interval", "minutes", "saved"), [(None, 2.5, [3, 6, 8]), (4, 2.5, [3, 4, 7, 8]), (None, 60.0, [8])]
)
def test_checkpoints_are_saved_by_time(
    one_rank: Topology, tmp_path: Path, interval: int | None, minutes: float, saved: list[int]
) -> None:
    recorder = Recorder()
    intervals = {"save_interval": interval, "save_interval_minutes": minutes}
    _run(one_rank, [recorder, OneMinuteIterations()], tmp_path, **intervals, train_iters=8, eval_iters=0)
    assert [call for call in recorder.calls if "save" in call] == [f"save at {each}" for each in saved]


def test_a_callback_stops_the_run(one_rank: Topology, tmp_path: Path) -> None:
    recorder = Recorder()
    assert _run(one_rank, [recorder, StopAtLoss(100.0)], tmp_path, train_iters=10) == 0
    assert recorder.calls == ["start at 0", "before 1", "after 1", "between 1 and 2", "save at 1", "end at 1"]
    assert (tmp_path / "latest").read_text() == "iter_0000001\n"


@pytest.mark.parametrize("hook", ["before_step", "after_step", "after_iteration", "on_evaluation", "on_save"])
def test_any_hook_may_stop_the_run(one_rank: Topology, tmp_path: Path, hook: str) -> None:
    class Stopping(Callback):
        pass

    def stop(self: Callback, loop: TrainingLoop, *_: object) -> None:
        loop.request_stop(Stop(hook))

    setattr(Stopping, hook, stop)
    recorder = Recorder()
    assert _run(one_rank, [Stopping(), recorder], tmp_path, train_iters=5, eval_interval=1) == 0
    assert recorder.calls[-1] == "end at 1"
    assert (tmp_path / "latest").read_text() == "iter_0000001\n"


def test_a_finished_run_is_not_stopped(one_rank: Topology) -> None:
    class StoppingLast(Callback):
        def after_step(self, loop: TrainingLoop, result: StepResult) -> None:
            if loop.is_finished:
                loop.request_stop(Stop("too late"))

    recorder = Recorder()
    assert _run(one_rank, [recorder, StoppingLast()]) == 0
    assert recorder.calls[-2:] == ["test at 2", "end at 2"]


def test_a_callback_cleans_up_after_an_error(one_rank: Topology) -> None:
    ended = []

    class Failing(Callback):
        @contextmanager
        def running(self, loop: TrainingLoop) -> Iterator[None]:
            try:
                yield
            finally:
                ended.append(loop.iteration)

        def after_step(self, loop: TrainingLoop, result: StepResult) -> None:
            raise KeyError

    recorder = Recorder()
    with pytest.raises(KeyError):
        _run(one_rank, [recorder, Failing()])
    assert ended == [1]
    assert recorder.calls == ["start at 0", "before 1", "after 1"]
