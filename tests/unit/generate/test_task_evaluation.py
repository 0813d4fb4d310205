"""Tasks of lm-evaluation-harness at an interval of a training run, and mistakes found before it starts."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lm_eval.tasks import TaskManager
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megalite.config import Config, DataConfig, LoggingConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.config.validate import problems_of, unused_options
from megalite.distributed.topology import Topology
from megalite.generate import benchmark_tasks
from megalite.generate.task_evaluation import load_tasks, scores_of
from megalite.observe.report.run_history import TASKS, read_history
from megalite.train.callbacks import default_callbacks
from megalite.train.loop import train
from megalite.train.rank_training import task_evaluation
from megalite.train.run_context import resolve_run
from megalite.train.stopping import RequeueNote, StopConditions, StopSignals
from megalite.train.telemetry.metrics import TaskScores
from megalite.train.telemetry.writers import Writers, task_line
from megalite.train.trainer import start_trainer
from megalite.utils.errors import UserError
from tests.unit.generate.test_benchmark_tasks import write_task


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the task `verses`. The harness's own tasks are not read, which takes long."""
    monkeypatch.setattr(benchmark_tasks, "TaskManager", partial(TaskManager, include_defaults=False))
    write_task(tmp_path)
    return tmp_path


def config_of(folder: Path, tasks: str | None = "verses", seq_length: int = 128, **training: Any) -> Config:
    fields = {"train_iters": 5, "eval_tasks": tasks, "eval_tasks_interval": 2, **training}
    return Config(
        model=replace(PRESETS["gpt-tiny"], num_layers=1, vocab_size=257, seq_length=seq_length),
        data=DataConfig(mock_data=True, tokenizer_type="byte"),
        training=TrainingConfig(global_batch_size=2, eval_iters=0, eval_tasks_folder=str(folder), **fields),
        logging=LoggingConfig(
            tensorboard_dir=str(folder / "board"), metrics_file=str(folder / "metrics.jsonl")
        ),
    )


def test_scores_are_logged_at_the_interval_and_at_the_end(
    folder: Path, one_rank: Topology, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(folder)
    make = task_evaluation(resolve_run(config, one_rank))
    state = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    with (
        caplog.at_level(logging.INFO, "megalite"),
        Writers(config.logging, one_rank, "") as writers,
        start_trainer(config, one_rank) as trainer,
    ):
        stop = StopConditions(config.training, one_rank, StopSignals(RequeueNote(None)))
        assert train(trainer, stop, [*make(writers), *default_callbacks(writers, config)]) == 0
    lines = [line for line in caplog.text.splitlines() if "task scores" in line]
    assert [line.partition("iteration ")[2].split()[0] for line in lines] == ["2", "4", "5"]
    assert all("| verses acc: " in line for line in lines)
    rows = [row for row in read_history(folder / "metrics.jsonl").evaluations if row.name == TASKS]
    assert [(row.iteration, row.values["consumed_samples"]) for row in rows] == [(2, 4), (4, 8), (5, 10)]
    assert all(f"| verses acc: {row.values['verses/acc']:.6E} |" in caplog.text for row in rows)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == state
    events = EventAccumulator(str(folder / "board")).Reload()
    assert [event.step for event in events.Scalars("tasks/verses/acc")] == [2, 4, 5]
    assert all(
        event.value in (0.0, pytest.approx(1 / 3), pytest.approx(2 / 3), 1.0)
        for event in events.Scalars("tasks/verses/acc")
    )


def test_mistakes_in_tasks_are_found_before_the_run_starts(folder: Path, one_rank: Topology) -> None:
    def refused(config: Config, message: str) -> None:
        with pytest.raises(UserError, match=message):
            load_tasks(resolve_run(config, one_rank))

    refused(
        config_of(folder, "verses,nothing"), "--eval-tasks nothing: lm-evaluation-harness does not know it"
    )
    refused(config_of(folder, seq_length=48), "a task has an answer of 66 tokens, and the model reads 48")
    text = (folder / "verses.yaml").read_text()
    text = text.replace("task: verses", "task: told").replace("multiple_choice", "generate_until")
    text = text.replace("metric: acc", "metric: exact_match").replace('doc_to_choice: "{{choices}}"\n', "")
    (folder / "told.yaml").write_text(text)
    refused(config_of(folder, "told"), "--eval-tasks: told generates text, for which training keeps no keys")
    (folder / "rows.jsonl").unlink()
    refused(config_of(folder), "the data of a task cannot be loaded")


def test_without_the_harness_it_is_one_line(
    tmp_path: Path, one_rank: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="--eval-tasks needs lm-evaluation-harness: pip install"):
        task_evaluation(resolve_run(config_of(tmp_path), one_rank))


def test_what_the_config_says(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert not problems_of(config, 1)
    without = replace(config, data=DataConfig(mock_data=True))
    assert "--eval-tasks verses needs a tokenizer" in "\n".join(problems_of(without, 1))
    bert = replace(config, model=replace(config.model, architecture="bert"))
    assert "which does not predict next tokens" in "\n".join(problems_of(bert, 1))
    unused = "\n".join(unused_options(config_of(tmp_path, None), 1))
    assert "--eval-tasks-interval 2 has no effect: --eval-tasks is not set" in unused


def test_scores_have_the_names_of_task_metric_and_filter() -> None:
    metrics = {"acc,none": 0.5, "acc_stderr,none": 0.1, "em,strict-match": 1, "alias": "a", "n,none": "N/A"}
    scores = scores_of({"a": metrics, "b": {"acc,none": 0.25}})
    assert scores == {"a/acc": 0.5, "a/em strict-match": 1.0, "b/acc": 0.25}
    line = task_line(TaskScores(7, 70, scores))
    assert line.startswith("task scores at iteration 7 | a acc: 5.000000E-01 | a em strict")
