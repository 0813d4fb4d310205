"""A change of the layout does not end a run for its callbacks, and frees the old model before the new."""

from __future__ import annotations

import json
import weakref
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from megalite.checkpoint.saver import Saver
from megalite.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    LoggingConfig,
    ParallelConfig,
    TrainingConfig,
)
from megalite.config.presets import PRESETS
from megalite.distributed.topology import Topology
from megalite.observe.verify.layouts import Layout
from megalite.plan.rank_plan import RankPlan
from megalite.train.callbacks import default_callbacks
from megalite.train.layout_changes import LayoutChanges
from megalite.train.loop import Callback, TrainingLoop, train
from megalite.train.run_context import RunContext, resolve_run
from megalite.train.stopping import RequeueNote, Stop, StopConditions, StopSignals
from megalite.train.telemetry.metrics import ValidationMetrics
from megalite.train.telemetry.writers import Writers
from megalite.train.train_step import StepResult
from megalite.train.trainer import LayoutChange, Relayout, Trainer, start_trainer
from megalite.utils.log import log
from tests.live_bytes import wait_for_other_threads
from tests.live_ranks import run_ranks
from tests.ranks.checkpoint.saving import Gate, writer

LAYOUTS = {2: "tp2", 4: "dp2+zero2"}
NUM_ITERATIONS = 6


class Recorder(Callback):
    """Records hooks, and what holds the old layout's memory."""

    def __init__(self, last_iteration: int) -> None:
        self.calls: list[str] = []
        self.losses: list[float] = []
        self.old: list[weakref.ref[Any]] = []
        self._last_iteration = last_iteration

    def on_start(self, loop: TrainingLoop) -> None:
        self.calls.append("start")

    def after_iteration(self, loop: TrainingLoop, result: StepResult) -> None:
        self.losses.append(result.loss)
        if loop.iteration == self._last_iteration:
            loop.request_stop(Stop("this is the last one"))

    def before_layout_change(self, loop: TrainingLoop) -> None:
        trainer = loop.trainer
        state = [each for each in trainer.optimizer.state().values() if isinstance(each, Tensor)]
        weights = [weight for chunk in trainer.chunks for weight in chunk.parameters()]
        moments = [moment for each in trainer.optimizer.states for moment in each.moments.values()]
        modules = [module for chunk in trainer.chunks for module in chunk.modules()]
        objects = [trainer.optimizer, trainer.pipeline, trainer.train_step, *modules]
        self.old = [weakref.ref(each) for each in (*objects, *weights, *state, *moments)]

    def after_layout_change(self, loop: TrainingLoop, change: LayoutChange) -> None:
        self.calls.append(f"{change.after} after {loop.iteration}")

    def on_evaluation(self, loop: TrainingLoop, metrics: ValidationMetrics) -> None:
        self.calls.append(f"{metrics.split} at {metrics.iteration}")

    def on_save(self, loop: TrainingLoop) -> None:
        self.calls.append(f"save at {loop.iteration}")

    def on_end(self, loop: TrainingLoop) -> None:
        self.calls.append("end")


def config_of(folder: Path) -> Config:
    config = Config(
        model=replace(PRESETS["gpt-tiny"], num_layers=2, vocab_size=64, seq_length=16, params_dtype="fp64"),
        data=DataConfig(mock_data=True),
        parallel=ParallelConfig(pipeline_model_parallel_size=2),
        training=TrainingConfig(
            **{"global_batch_size": 2, "micro_batch_size": 1, "train_iters": NUM_ITERATIONS, "eval_iters": 1},
            **{"eval_interval": 4, "audit_interval": 1, "manual_gc": True},
        ),
        logging=LoggingConfig(
            **{"log_interval": 4, "timing_log_level": 2, "log_time_breakdown": True},
            **{"trace_pipeline": "2:3", "log_straggler_interval": 2, "metrics_file": f"{folder}/m.jsonl"},
            **{"trace_pipeline_path": f"{folder}/trace.json"},
        ),
    )
    return replace(
        config,
        checkpoint=replace(
            config.checkpoint, save=f"{folder}/save", load=f"{folder}/save", save_interval=2, async_save=True
        ),
    )


def relayout_to(name: str, base: Config) -> Relayout:
    def relayout(trainer: Trainer) -> LayoutChange:
        return LayoutChange("", name, 0.0, trainer.change_layout(Layout.parse(name).apply(base, 2)))

    return relayout


def run(topology: Topology, config: Config, last_iteration: int) -> tuple[list[str], list[float]]:
    recorder, build, finish, gate = Recorder(last_iteration), Trainer._build, Saver.finish, Gate()

    def build_alone(trainer: Trainer, run: RunContext, *args: Any) -> None:
        wait_for_other_threads()
        assert not recorder.old or (Path(config.checkpoint.save or "") / "latest").exists()  # no save runs
        assert not [each for each in (ref() for ref in recorder.old) if each is not None]
        build(trainer, run, *args)

    def finish_save(saver: Saver) -> None:
        gate.open()
        finish(saver)

    stop_conditions = StopConditions(config.training, topology, StopSignals(RequeueNote(None)))
    with (
        mock.patch.object(Trainer, "_build", build_alone),
        mock.patch.object(Saver, "finish", finish_save),
        writer(gate),  # so the save is in flight when the layout is to change
        Writers(config.logging, topology, "") as writers,
        start_trainer(config, topology) as trainer,
    ):
        loaded = trainer.load()
        callbacks = [recorder, *default_callbacks(writers, config)]
        layouts = {iteration: relayout_to(name, trainer.config) for iteration, name in LAYOUTS.items()}
        train(trainer, stop_conditions, callbacks, loaded and loaded.callbacks, layouts)
        assert trainer.topology.groups() == topology.groups()
    assert bool(recorder.old) is True
    return recorder.calls, recorder.losses


def test_callbacks_continue_and_a_resumed_run_begins_in_its_layout(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    (tmp_path / "save").mkdir()
    (calls, losses), *others = run_ranks(run, config.mesh, 2, config, 5)
    assert all(each == (calls, losses) for each in others)
    assert calls == [
        *("start", "save at 2", "tp2 after 2", "valid at 4", "save at 4", "dp2+zero2 after 4"),
        *("save at 5", "end"),
    ]
    (calls, more), *_ = run_ranks(run, config.mesh, 2, config, NUM_ITERATIONS)
    assert calls == ["start", "dp2+zero2 after 5", "save at 6", "valid at 6", "test at 6", "end"]
    records = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [each["iteration"] for each in records if "iteration" in each] == [4, 6]
    whole = replace(config, checkpoint=replace(config.checkpoint, save=None, load=None, async_save=False))
    expected = run_ranks(undisturbed, whole.mesh, 2, whole)[0]
    assert losses + more == pytest.approx(expected, rel=1e-12)


def undisturbed(topology: Topology, config: Config) -> list[float]:
    with start_trainer(config, topology) as trainer:
        return [trainer.step().loss for _ in range(NUM_ITERATIONS)]


def ask(topology: Topology, config: Config) -> tuple[list[object], dict[str, int], list[str]]:
    """Ask for layouts by the file, one after the other."""
    file, found, lines = Path(config.checkpoint.layout_file or ""), list[object](), list[str]()
    with (
        start_trainer(config, topology) as trainer,
        mock.patch.object(log, "error", lambda message, *values: lines.append(message % values)),
    ):
        run = resolve_run(config, topology)
        changes = LayoutChanges(trainer, run, {}, RankPlan(run.config, topology, num_local=2), ExitStack())
        for text in ("", "banana", "tp4", None, None, "dp2", "tp2\n"):
            if topology.rank == 0:
                file.mkdir() if text is None else file.write_text(text)
            free = 10**8 if text == "dp2" and topology.rank == 1 else 10**15
            with mock.patch("megalite.train.layout_changes.free_bytes", lambda free=free: free):
                relayout = changes.requested()
            found.append(relayout is not None)
            if topology.rank == 0:
                found.append(file.exists())
                if text is None:
                    file.rmdir()
        assert relayout is not None
        assert changes.requested() is None  # it is not there any more
        found.append(relayout(trainer).after)
    return found, topology.sizes, lines


def test_what_the_layout_file_asks_for(tmp_path: Path) -> None:
    """A file that is still empty is read again, a mistake deleted; one that cannot be is logged once."""
    config = config_of(tmp_path)
    file = tmp_path / "layout"
    config = replace(config, checkpoint=CheckpointConfig(layout_file=str(file)))
    first, (found, sizes, lines) = run_ranks(ask, config.mesh, 2, config)
    assert first[0][:10] == [False, True, False, False, False, False, False, True, False, True]
    assert first[0][10:] == [False, False, True, False, "tp2"]
    assert found == [False, False, False, False, False, False, True, "tp2"]
    assert (sizes["tp"], sizes["pp"]) == (2, 1)
    banana, other_size, folder, no_memory = lines
    assert banana.startswith(f"--layout-file {file}, banana: layout 'banana' must consist of")
    assert banana.endswith("; the layout stays")
    assert "tp4: tp4 has 4 ranks, and the run 2: write sizes whose product is 2" in other_size
    assert folder == f"--layout-file {file}: it cannot be read and deleted (Is a directory); the layout stays"
    assert no_memory.endswith("save, and start again in this layout; the layout stays")
