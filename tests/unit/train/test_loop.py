"""The hooks of the training loop: their order, a user's own stop, and the clean-up after an error."""

from __future__ import annotations

import gc
import json
import logging
import math
import runpy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.checkpoint.full_tensors import FullReader
from megalite.checkpoint.manifest import read_manifest
from megalite.checkpoint.saver import Saver
from megalite.config import CheckpointConfig, Config, DataConfig, OptimizerConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.distributed.topology import Topology
from megalite.train.callbacks import (
    Audit,
    ExpertLogging,
    LayerNorms,
    MetricsLogging,
    ModuleProfile,
    NanLocation,
    OptimizerNorms,
    PipelineTracing,
    Profiler,
    RoutingRecording,
    RoutingReplay,
    Stragglers,
    default_callbacks,
)
from megalite.train.loop import (
    Callback,
    Checkpointing,
    Evaluation,
    GarbageCollection,
    TrainingLoop,
    train,
)
from megalite.train.rank_training import check_callbacks
from megalite.train.stopping import RequeueNote, Stop, StopConditions, Stopped, StopSignals
from megalite.train.telemetry.metrics import ValidationMetrics
from megalite.train.telemetry.writers import Writers
from megalite.train.train_step import StepResult
from megalite.train.trainer import LayoutChange, Relayout, Trainer, start_trainer
from megalite.utils.errors import UserError
from tests.checkpoint_folder import RUN, edit, edit_run

ROOT = Path(__file__).parents[3]


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

    def before_layout_change(self, loop: TrainingLoop) -> None:
        self.calls.append(f"layout ends at {loop.iteration}")

    def after_layout_change(self, loop: TrainingLoop, change: LayoutChange) -> None:
        self.calls.append(f"{change.after} at {loop.iteration}")

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
    checkpoint: CheckpointConfig | None = None,
    loads: bool = False,
    ema_decay: float | None = None,
    layouts: Mapping[int, Relayout] | None = None,
    **training: int,
) -> int:
    config = Config(
        model=replace(PRESETS["gpt-tiny"], vocab_size=64, seq_length=16),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(
            **{"global_batch_size": 2, "micro_batch_size": 1, "train_iters": 2, "eval_iters": 1, **training}
        ),
        # A resumed run may be longer.
        optimizer=OptimizerConfig(lr_decay_style="constant", ema_decay=ema_decay),
        checkpoint=checkpoint
        or CheckpointConfig(
            save=str(folder) if folder else None, load=str(folder) if loads else None, save_interval=1
        ),
    )
    stop_conditions = StopConditions(config.training, topology, StopSignals(RequeueNote(None)))
    with Writers(config.logging, topology, "") as writers, start_trainer(config, topology) as trainer:
        loaded = trainer.load() if loads else None
        states = loaded and loaded.callbacks
        callbacks = [*callbacks, *default_callbacks(writers, config)]
        return train(trainer, stop_conditions, callbacks, states, layouts)


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


def test_only_a_finished_run_asks_for_a_start_because_of_an_upload(
    one_rank: Topology, tmp_path: Path
) -> None:
    """A kill switch or --exit-interval says that a user wants the end, or how the next start is made."""

    class Leaving(Callback):
        def on_end(self, loop: TrainingLoop) -> None:
            loop.trainer.saver.has_left = True

    assert _run(one_rank, [Leaving()], tmp_path) == 75
    assert _run(one_rank, [Leaving()], tmp_path, loads=True, train_iters=4, exit_interval=3) == 0


def test_layouts_change_after_their_iterations(
    one_rank: Topology, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No object is frozen then, so that Python can collect the old model."""
    recorder, collector = Recorder(), list[str]()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, partial(collector.append, name))

    def layout(name: str) -> Relayout:
        def relayout(trainer: Trainer) -> LayoutChange:
            collector.append(name)
            return LayoutChange("the first", name, 0.5, 1000)

        return relayout

    def run(num_iterations: int, **options: bool) -> list[str]:
        recorder.calls = []
        layouts = {1: layout("A"), 3: layout("B")}
        _run(one_rank, [recorder], tmp_path, layouts=layouts, train_iters=num_iterations, **options)
        return [call for call in recorder.calls if not call.startswith(("before", "between"))]

    assert run(3, manual_gc=True) == [
        *("start at 0", "after 1", "save at 1", "layout ends at 1", "A at 1"),
        *("after 2", "save at 2", "after 3", "save at 3", "valid at 3", "test at 3", "end at 3"),
    ]
    assert collector == ["freeze", "freeze", "unfreeze", "A", "freeze", "unfreeze"]
    resumed = ["start at 3", "layout ends at 3", "B at 3", "after 4", "save at 4", "valid at 4", "test at 4"]
    assert run(4, loads=True) == [*resumed, "end at 4"]


@pytest.mark.parametrize(
    ("interval", "minutes", "local_minutes", "saved"),
    [
        (None, 2.5, None, ["3", "6", "8"]),
        (4, 2.5, None, ["3", "4", "7", "8"]),
        (None, 60.0, None, ["8"]),
        (5, None, 1.5, ["local 2", "local 4", "5", "local 7", "8"]),
    ],
)
def test_checkpoints_are_saved_by_time(
    one_rank: Topology,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    interval: int | None,
    minutes: float | None,
    local_minutes: float | None,
    saved: list[str],
) -> None:
    recorder = Recorder()
    monkeypatch.setattr(
        TrainingLoop, "save_local", lambda loop: recorder.calls.append(f"save at local {loop.iteration}")
    )
    checkpoint = CheckpointConfig(
        save=str(tmp_path),
        save_interval=interval,
        save_interval_minutes=minutes,
        non_persistent_save_interval_minutes=local_minutes,
        non_persistent_local_ckpt_dir=str(tmp_path / "local"),
    )
    callbacks = [recorder, OneMinuteIterations()]
    _run(one_rank, callbacks, checkpoint=checkpoint, train_iters=8, eval_iters=0)
    assert [call for call in recorder.calls if "save" in call] == [f"save at {each}" for each in saved]


def test_the_last_save_of_a_group_waits_for_a_running_one(
    one_rank: Topology, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(TrainingLoop, "save_local", lambda loop: calls.append("save"))
    monkeypatch.setattr(Saver, "finish", lambda saver: calls.append("wait"))

    class Regrouping(Callback):
        def after_step(self, loop: TrainingLoop, result: StepResult) -> None:
            loop.request_stop(Stop("processes have joined", regroups=True))

    checkpoint = CheckpointConfig(
        save=str(tmp_path),
        non_persistent_save_interval=100,
        non_persistent_local_ckpt_dir=str(tmp_path / "local"),
    )
    _run(one_rank, [Regrouping()], checkpoint=checkpoint, train_iters=8, eval_iters=0)
    assert calls[:2] == ["wait", "save"]


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


class SumOfLosses(Callback):
    """Sums the losses of a run, in a list as state.

    Attributes:
        started_with: the sum before the first iteration.
    """

    def __init__(self) -> None:
        self.sums = [0.0, math.inf]

    def on_start(self, loop: TrainingLoop) -> None:
        self.started_with = self.sums[0]

    def after_step(self, loop: TrainingLoop, result: StepResult) -> None:
        self.sums[0] += result.loss

    def state(self) -> dict[str, Any]:
        return {"sums": self.sums}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.sums = state["sums"]


class NumIterations(SumOfLosses):
    """Counts the iterations of a run."""

    def after_step(self, loop: TrainingLoop, result: StepResult) -> None:
        self.sums[0] += 1


def test_a_resumed_run_continues_with_the_state_of_its_callbacks(one_rank: Topology, tmp_path: Path) -> None:
    whole, count = SumOfLosses(), NumIterations()
    _run(one_rank, [whole, count], train_iters=4, eval_iters=0)
    first, second = SumOfLosses(), SumOfLosses()
    _run(one_rank, [first, NumIterations()], tmp_path, train_iters=2, eval_iters=0)
    _run(one_rank, [count := NumIterations(), second], tmp_path, loads=True, train_iters=4, eval_iters=0)
    assert second.started_with == first.sums[0] > 0
    assert second.sums == whole.sums
    assert second.sums[1] == math.inf
    assert (count.started_with, count.sums[0]) == (2, 4)


def test_run_json_holds_the_states_as_standard_json(one_rank: Topology, tmp_path: Path) -> None:
    _run(one_rank, [NumIterations(), Recorder()], tmp_path, eval_iters=0)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    for iteration in (1, 2):
        text = (tmp_path / f"iter_{iteration:07d}" / "run.json").read_text()
        states = json.loads(text, parse_constant=refuse)["callbacks"]
        assert json.loads(states["NumIterations"]) == {"sums": [iteration, math.inf]}
        assert states.keys() == {"NumIterations", "Goodput"}


def test_callbacks_may_come_and_go(
    one_rank: Topology, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _run(one_rank, [NumIterations()], tmp_path, eval_iters=0)
    caplog.set_level(logging.INFO)
    _run(one_rank, [added := SumOfLosses()], tmp_path, loads=True, train_iters=3, eval_iters=0)
    lines = [record.getMessage() for record in caplog.records]
    assert "the checkpoint has no state of callback SumOfLosses: it begins anew" in lines
    assert "the checkpoint's state of callback NumIterations is not used: this run has none" in lines
    assert added.started_with == 0


def test_a_checkpoint_without_states_loads(one_rank: Topology, tmp_path: Path) -> None:
    _run(one_rank, [], tmp_path, eval_iters=0)
    edit(tmp_path / "iter_0000002", RUN, lambda run: run.pop("callbacks") and None)
    _run(one_rank, [NumIterations()], tmp_path, loads=True, train_iters=3, eval_iters=0)


@pytest.mark.parametrize("states", [[], {"A": {}}, {"A": "{"}, {"A": "[]"}])
def test_damaged_states_are_refused(one_rank: Topology, tmp_path: Path, states: object) -> None:
    _run(one_rank, [], tmp_path, train_iters=1, eval_iters=0)
    edit_run(tmp_path / "iter_0000001", callbacks=states)
    with pytest.raises(UserError, match="damaged: its callbacks are malformed"):
        _run(one_rank, [], tmp_path, loads=True, eval_iters=0)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([1], "Stateful.state returns a list: return a dict"),
        ({"a": [0, torch.ones(2)]}, r"Stateful.state\(\)\['a'\]\[1\] is a Tensor: .* pass tensor.tolist\(\)"),
        (
            {"a": (1, 2)},
            r"Stateful.state\(\)\['a'\] is a tuple: a checkpoint holds dicts with str keys, lists",
        ),
        ({"a": {1: 2}}, r"Stateful.state\(\)\['a'\] has the key 1: a checkpoint holds"),
        ({"a": "a" * (1 << 20)}, "Stateful.state returns 1,048,585 bytes as JSON: the limit is 1,048,576"),
    ],
)
def test_a_state_that_cannot_be_saved_is_refused_before_the_first_iteration(
    one_rank: Topology, state: Any, message: str
) -> None:
    class Stateful(NumIterations):
        def state(self) -> Any:
            return state

    with pytest.raises(UserError, match=f"^{message}") as caught:
        _run(one_rank, [callback := Stateful()])
    assert len(str(caught.value).splitlines()) == 1
    assert callback.sums[0] == 0


class OnlyState(Callback):
    def state(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ([OnlyState()], "OnlyState does not define load_state: define state and load_state, or neither"),
        ([NumIterations(), NumIterations()], "callbacks holds two NumIterations with a state, .* a subclass"),
    ],
)
def test_callbacks_whose_states_cannot_be_told_apart(callbacks: list[Callback], message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        check_callbacks(callbacks)
    check_callbacks([NumIterations(), SumOfLosses(), Recorder(), Recorder()])


def test_the_example_stops_early_in_a_resumed_run(one_rank: Topology, tmp_path: Path) -> None:
    early_stopping = runpy.run_path(str(ROOT / "examples" / "own_callback.py"))["EarlyStopping"]
    _run(one_rank, [early_stopping(3)], tmp_path, train_iters=3, eval_interval=1)
    edit_run(
        tmp_path / "iter_0000003",
        callbacks={"EarlyStopping": json.dumps({"lowest": 0.0, "num_worse": 1})},
    )
    stopping = early_stopping(3)
    _run(one_rank, [stopping], tmp_path, loads=True, train_iters=9, eval_interval=1)
    assert (stopping.lowest, stopping.num_worse) == (0.0, 3)
    assert (tmp_path / "latest").read_text() == "iter_0000005\n"


def test_any_callback_may_evaluate_and_save(one_rank: Topology, tmp_path: Path) -> None:
    class AtTheSecond(Callback):
        def after_iteration(self, loop: TrainingLoop, result: StepResult) -> None:
            if loop.iteration == 2:
                loop.evaluate("test")
                loop.save()

    recorder = Recorder()
    _run(one_rank, [recorder, AtTheSecond()], checkpoint=CheckpointConfig(save=str(tmp_path)), train_iters=3)
    assert [call for call in recorder.calls if "save" in call or "test" in call] == [
        *("test at 2", "save at 2"),
        *("save at 3", "test at 3"),
    ]


def test_a_callback_with_hooks_between_iterations_needs_the_boundary(
    one_rank: Topology, caplog: pytest.LogCaptureFixture
) -> None:
    class Queueing(Callback):
        def after_step(self, loop: TrainingLoop, result: StepResult) -> None: ...

        def needs_boundary(self, loop: TrainingLoop, iteration: int) -> bool:
            return False

    config = Config(
        model=replace(PRESETS["gpt-tiny"], vocab_size=64),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(train_iters=2, eval_iters=0),
    )
    stop = StopConditions(config.training, one_rank, StopSignals(RequeueNote(None)))
    with start_trainer(config, one_rank) as trainer, caplog.at_level(logging.INFO, "megalite"):
        loop = TrainingLoop(
            trainer, stop, [OneMinuteIterations(), StopAtLoss(99.0), OnlyState(), Queueing(), Evaluation()]
        )
        loop.queues_next = True  # as on a GPU
        loop.run()
    lines = [record.getMessage() for record in caplog.records if "queued" in record.getMessage()]
    assert lines == [
        "no iteration is queued before the hooks of OneMinuteIterations, StopAtLoss (needs_boundary)"
    ]


@pytest.mark.parametrize("queues_next", [False, True])
def test_a_requested_layout_begins_between_iterations_none_of_which_is_queued(
    one_rank: Topology, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queues_next: bool
) -> None:
    """The request is seen after the second iteration; on a GPU the third one has been queued by then."""
    monkeypatch.setattr("megalite.train.stopping.CHECK_SECONDS", 1e-9)  # after every iteration
    file, queued = tmp_path / "layout", dict[int, bool]()

    class Requests(Recorder):
        def on_start(self, loop: TrainingLoop) -> None:
            loop.queues_next = queues_next

        def before_step(self, loop: TrainingLoop) -> None:
            if loop.next_iteration == 2:
                file.touch()

        def after_step(self, loop: TrainingLoop, result: StepResult) -> None: ...

        def after_iteration(self, loop: TrainingLoop, result: StepResult) -> None: ...

        def needs_boundary(self, loop: TrainingLoop, iteration: int) -> bool:
            return False

    def step(trainer: Trainer, *, queues_next: bool = False) -> StepResult:
        queued[trainer.progress.iteration + 1] = queues_next
        return original(trainer, queues_next=False)

    def requested() -> Relayout:
        file.unlink()
        return lambda trainer: LayoutChange("the first", "A", 0.5, 1000)

    original = Trainer.step
    monkeypatch.setattr(Trainer, "step", step)
    config = Config(
        model=replace(PRESETS["gpt-tiny"], vocab_size=64),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(train_iters=5, eval_iters=0),
    )
    stop = StopConditions(config.training, one_rank, StopSignals(RequeueNote(None)), layout_file=str(file))
    recorder = Requests()
    with start_trainer(config, one_rank) as trainer:
        train(trainer, stop, [recorder], requested_layout=requested)
    at = 3 if queues_next else 2
    assert recorder.calls == [f"layout ends at {at}", f"A at {at}", "end at 5"]
    assert queued == {each: queues_next and each not in (3, 5) for each in range(1, 6)}


EVERY = list(range(1, 9))
BOUNDARIES: list[tuple[Callback, dict[str, Any], dict[str, Any], list[int]]] = [
    (Evaluation(), {"eval_interval": 4}, {}, [4, 8]),
    (Checkpointing(), {"save_interval": 3, "non_persistent_save_interval": 2}, {}, [2, 3, 4, 6, 8]),
    (GarbageCollection(), {"manual_gc_interval": 1}, {}, []),
    (NanLocation(), {}, {}, []),
    (Profiler(), {"profile_execution": True}, {}, []),
    (Audit(), {"audit_interval": 4}, {}, [3, 4, 7, 8]),
    (ModuleProfile(), {"profile_modules": 5}, {}, [4]),
    (PipelineTracing(), {}, {"_numbers": range(5, 7)}, [4, 5, 6]),
    (Stragglers(), {}, {"_interval": 4}, [3, 4, 7, 8]),
    (RoutingRecording(), {"record_routing": "r", "record_routing_iterations": "5:6"}, {}, [4, 5, 6]),
    (RoutingReplay(), {}, {}, EVERY),
    (LayerNorms(None), {"log_layer_grad_norms_interval": 4}, {}, [4, 8]),
    (OptimizerNorms(None), {"tensorboard_log_interval": 4}, {}, [4, 8]),
    (
        ExpertLogging(None),
        {"num_experts": 2, "metrics_file": "m", "log_experts_interval": 4},
        {},
        [3, 4, 7, 8],
    ),
    (MetricsLogging(None), {}, {"meters": {1: None}}, []),
    (MetricsLogging(None), {"timing_log_level": 1}, {"meters": {4: None, 3: None}}, [3, 4, 6, 8]),
    (MetricsLogging(None), {"log_num_zeros_in_grad": True}, {"meters": {4: None}}, EVERY),
    (MetricsLogging(None), {"log_interval": 5}, {"times": object()}, [3, 4, 5, 8]),
]  # type: ignore[arg-type]
"""A callback, options, what its `running` would set, and the iterations whose hooks precede the next one."""


@pytest.mark.parametrize("row", BOUNDARIES, ids=lambda row: type(row[0]).__name__)
def test_iterations_that_are_known_to_need_the_boundary(
    row: tuple[Callback, dict[str, Any], dict[str, Any], list[int]],
) -> None:
    callback, options, attributes, expected = row
    config = Config()
    for name, value in options.items():
        (group,) = (each.name for each in fields(config) if hasattr(getattr(config, each.name), name))
        config = replace(config, **{group: replace(getattr(config, group), **{name: value})})
    vars(callback).update(attributes)
    timers = SimpleNamespace(level=config.logging.timers_level)
    loop: Any = SimpleNamespace(trainer=SimpleNamespace(config=config, timers=timers))
    assert [each for each in EVERY if callback.needs_boundary(loop, each)] == expected


UP = "layers.0.mlp.up.weight"


def _saved(checkpoint: Path) -> tuple[Tensor, Tensor]:
    """A matrix of the model and its average."""
    reader = FullReader(read_manifest(checkpoint))
    return reader.tensor(f"model.{UP}"), reader.tensor(f"ema.{UP}")


def test_averages_are_evaluated_after_the_weights(one_rank: Topology, tmp_path: Path) -> None:
    found: list[tuple[bool, float]] = []
    weights: list[Tensor] = []

    class Saving(Callback):
        def on_evaluation(self, loop: TrainingLoop, metrics: ValidationMetrics) -> None:
            found.append((metrics.is_of_average, metrics.lm_loss))
            weights.append(loop.trainer.optimizer.weight(UP).clone())
            if metrics.is_of_average:
                loop.save()

    _run(
        one_rank,
        [Saving()],
        checkpoint=CheckpointConfig(save=str(tmp_path)),
        ema_decay=0.5,
        train_iters=2,
        eval_interval=2,
    )
    assert [is_of_average for is_of_average, _ in found] == [False, True] * 2  # valid and test
    assert len({loss for _, loss in found}) == 4
    weight, average = _saved(tmp_path / "iter_0000002")
    assert all(each.equal(weight) for each in weights)
    assert not average.equal(weight)


def test_an_urgent_stop_interrupts_the_evaluation_of_averages(
    one_rank: Topology, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights: list[Tensor] = []

    class Urgent(Callback):
        def on_evaluation(self, loop: TrainingLoop, metrics: ValidationMetrics) -> None:
            assert not metrics.is_of_average
            weights.append(loop.trainer.optimizer.weight(UP).clone())

            def stop() -> None:
                raise Stopped(Stop("a signal", is_urgent=True))

            loop.stop_conditions.raise_if_urgent = stop  # type: ignore[method-assign]

    with caplog.at_level(logging.WARNING, "megalite"):
        _run(one_rank, [Urgent()], tmp_path, ema_decay=0.5, train_iters=3, eval_interval=2)
    assert "the evaluation at iteration 2 was interrupted" in caplog.text
    assert (tmp_path / "latest").read_text() == "iter_0000002\n"
    weight, average = _saved(tmp_path / "iter_0000002")  # after the interruption
    assert weights[0].equal(weight)
    assert not average.equal(weight)
