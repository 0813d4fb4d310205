"""A run in another layout sends tokens to recorded experts, and refuses a record that does not fit."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from megalite.config import (
    Config,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
)
from megalite.config.validate import unused_options
from megalite.distributed.topology import Topology
from megalite.model.experts import Router
from megalite.train.callbacks.audit import Audit
from megalite.train.callbacks.recorded_routing import RoutingRecording, RoutingReplay
from megalite.train.loop import Callback, TrainingLoop
from megalite.train.stopping import RequeueNote, StopConditions, StopSignals
from megalite.train.train_step import StepResult
from megalite.train.trainer import start_trainer
from megalite.utils.errors import UserError
from megalite.utils.log import log
from tests.live_ranks import run_ranks
from tests.ranks.model.test_expert_dispatch import CONFIG
from tests.ranks.observe.verify.test_record_run import RANKINGS

MODEL = replace(CONFIG, num_layers=2, mtp_num_layers=1)
NUM_TOKENS = 4 * 3 * MODEL.seq_length  # 4 samples in 3 layers with experts
ONE = ParallelConfig()
LAYOUTS = {
    "tp2": ParallelConfig(tensor_model_parallel_size=2),
    "tp2+sp": ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True),
    "pp2": ParallelConfig(pipeline_model_parallel_size=2),
    "cp2": ParallelConfig(context_parallel_size=2),
    "cp2+p2p+dynamic": ParallelConfig(
        context_parallel_size=2, cp_comm_type="p2p", dynamic_context_parallel=True
    ),
    "dp2ep2": ParallelConfig(expert_model_parallel_size=2),
}

SLOW = ("tp2", "pp2", "cp2")

Run = tuple[list[float], list[str]]
"""Losses of a run, and the lines of its log."""


class _Losses(Callback):
    """Collects the losses of a run."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def after_iteration(self, loop: TrainingLoop, result: StepResult) -> None:
        self.values.append(result.loss)


def _run(topology: Topology, config: Config) -> Run:
    lines: list[str] = []
    log.setLevel(logging.INFO)
    log.addFilter(lambda record: lines.append(record.getMessage()) or True)  # type: ignore[func-returns-value]
    losses = _Losses()
    replays = config.training.replay_routing_from is not None
    records = config.logging.record_routing is not None
    audits = config.training.audit_interval is not None
    callbacks = [
        losses,
        *([RoutingReplay()] * replays),
        *([RoutingRecording()] * records),
        *([Audit()] * audits),
    ]
    with (
        mock.patch.object(Router, "_ranking", RANKINGS["near ties"]),
        start_trainer(config, topology) as trainer,
    ):
        stop = StopConditions(config.training, topology, StopSignals(RequeueNote(None)))
        TrainingLoop(trainer, stop, callbacks).run()
    return losses.values, lines


def _config(
    parallel: ParallelConfig, logs: LoggingConfig, model: ModelConfig = MODEL, **training: object
) -> Config:
    return Config(
        model=model,
        parallel=parallel,
        optimizer=OptimizerConfig(lr=1e-3, lr_decay_style="constant"),
        data=DataConfig(mock_data=True, reset_attention_mask=True),
        training=replace(
            TrainingConfig(micro_batch_size=2, global_batch_size=4, train_iters=3, eval_iters=0), **training
        ),
        logging=replace(logs, log_interval=1),
    )


def _train(parallel: ParallelConfig, logs: LoggingConfig, dp: int = 1, **training: object) -> Run:
    size = parallel.tp * parallel.pp * parallel.cp * parallel.ep * dp
    config = _config(parallel, logs, **training)
    return run_ranks(_run, parallel.mesh, size, config)[0]


def _recorded(
    folder: Path, parallel: ParallelConfig = ONE, iterations: str | None = None, **training: object
) -> list[float]:
    logs = LoggingConfig(record_routing=str(folder), record_routing_iterations=iterations)
    return _train(parallel, logs, **training)[0]


def _replayed(folder: Path, parallel: ParallelConfig = ONE, **training: object) -> Run:
    return _train(parallel, LoggingConfig(), replay_routing_from=str(folder), **training)


@pytest.fixture(scope="module")
def of_one_rank(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Path]:
    """Return the losses of one rank, and the folder with its experts."""
    folder = tmp_path_factory.mktemp("one")
    return _recorded(folder), folder


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in LAYOUTS]
)
def test_layouts_replay_each_other(
    layout: str, of_one_rank: tuple[list[float], Path], tmp_path: Path
) -> None:
    """Without the replay, ties fall otherwise on two ranks than on one."""
    (of_one, folder_of_one), of_layout = of_one_rank, _recorded(tmp_path, LAYOUTS[layout], train_iters=2)
    assert of_one[:2] != pytest.approx(of_layout, rel=1e-6)
    for expected, folder, replaying, found in (
        (of_one[:2], folder_of_one, LAYOUTS[layout], "3 recorded iterations, samples 0 to 11"),
        (of_layout, tmp_path, ONE, "2 recorded iterations, samples 0 to 7"),
    ):
        losses, lines = _replayed(folder, replaying, train_iters=2)
        assert losses == pytest.approx(expected, rel=1e-12)
        assert f"replaying the experts of {found}" in lines
        (line,) = (each for each in lines if each.startswith("iteration 1: recorded experts"))
        count = re.search(r"replace others for (\d+) of (\d+) tokens, counted in each layer", line)
        assert count and 0 < int(count[1]) < NUM_TOKENS == int(count[2])


def test_iterations_without_a_record_route_as_usual(tmp_path: Path) -> None:
    expected = _recorded(tmp_path, iterations="2:3")
    losses, lines = _replayed(tmp_path)
    assert losses == expected  # bitwise: one rank replays itself
    assert [line.split(":")[0] for line in lines if "recorded experts" in line] == [
        "iteration 2",
        "iteration 3",
    ]
    found = [line.removesuffix(", counted in each layer") for line in lines if "replace others" in line]
    count = f"recorded experts replace others for 0 of {NUM_TOKENS} tokens"
    assert found == [f"iteration 2: {count}", f"iteration 3: {count}"]


def test_an_audit_does_not_count_tokens_again(of_one_rank: tuple[list[float], Path]) -> None:
    _, folder = of_one_rank
    _, lines = _train(ONE, LoggingConfig(), dp=2, replay_routing_from=str(folder), audit_interval=1)
    counted = [line for line in lines if "replace others for" in line]
    assert len(counted) == 3
    assert all(f" of {NUM_TOKENS} tokens" in line for line in counted)


def test_an_iteration_is_recorded_again_in_another_layout(tmp_path: Path) -> None:
    _recorded(tmp_path, LAYOUTS["pp2"], "1")
    expected = _recorded(tmp_path, ONE, "1")
    assert _replayed(tmp_path)[0] == expected


def test_other_global_batches_are_replayed_if_all_their_samples_are_recorded(
    of_one_rank: tuple[list[float], Path],
) -> None:
    _, folder = of_one_rank
    assert "samples 0 to 11" in "".join(_replayed(folder, global_batch_size=2, train_iters=2)[1])
    problem = "has 4 of the samples 8 to 15 of an iteration, not sample 12: pass the --global-batch-size"
    with pytest.raises(UserError, match=problem):
        _replayed(folder, global_batch_size=8, train_iters=2)


def test_an_iteration_that_is_skipped_replays_nothing(of_one_rank: tuple[list[float], Path]) -> None:
    lines = _replayed(of_one_rank[1], iterations_to_skip=("2",))[1]
    found = [line for line in lines if "recorded experts replace others" in line]
    assert [line.split(":")[0] for line in found] == ["iteration 1", "iteration 3"]


def test_a_folder_without_a_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no recorded iteration: pass a folder that a run has written"):
        _replayed(tmp_path / "none")


def test_a_model_without_routers_is_refused_in_one_line(tmp_path: Path, one_rank: Topology) -> None:
    config = _config(ONE, LoggingConfig(record_routing=str(tmp_path)), replace(CONFIG, num_experts=None))
    assert not any("--record-routing" in line for line in unused_options(config))
    with pytest.raises(UserError, match=r"no megalite.model.experts.Router: pass --num-experts, or remove"):
        _run(one_rank, config)
