"""Runs whose host queues the next iteration before it reads the results of the last one, as on a GPU."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint.full_tensors import FullReader
from megalite.checkpoint.manifest import read_manifest
from megalite.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
)
from megalite.config.presets import PRESETS
from megalite.distributed.topology import Topology
from megalite.observe.verify.layouts import Layout
from megalite.train.callbacks import default_callbacks
from megalite.train.loop import Callback, TrainingLoop, train
from megalite.train.stopping import RequeueNote, Stop, StopConditions, StopSignals
from megalite.train.telemetry.writers import Writers
from megalite.train.train_step import StepResult
from megalite.train.trainer import start_trainer
from megalite.utils.log import log
from tests.live_ranks import run_ranks
from tests.ranks.model.test_expert_dispatch import CONFIG as EXPERTS
from tests.ranks.train.callbacks.test_nan_locator import _break, _with_nan, _with_nan_gradient

BATCH, SAVE_INTERVAL, LAST, NUM_ITERATIONS = 8, 4, 6, 9
COMPARED = (
    *("iteration", "consumed_samples", "lm_loss", "grad_norm", "learning_rate", "loss_scale", "params_norm"),
    *("skipped", "num_skipped", "num_nan", "total_skipped", "total_nan", "validation"),
)
"""Metrics that do not depend on the machine."""
GPT = replace(PRESETS["gpt-tiny"], num_layers=2, vocab_size=64, seq_length=16, hidden_dropout=0.1)
# Forward counts the tokens of each expert, and the update changes the router's bias by them.
ROUTED = replace(
    EXPERTS,
    moe_router_bias_update_rate=0.1,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_load_balancing_type="global_aux_loss",
)
CLIPPED = {"qk_clip": True, "qk_clip_threshold": 0.01, "vocab_size": 64, "seq_length": 16}
ROWS = {
    "tp1, spikes": ("tp1", replace(GPT, params_dtype="bf16"), {}),
    "zero 3, experts": ("dp2+zero3", ROUTED, {"ema_decay": 0.5}),
    # Forward raises the largest scores of the iteration, and the update clips the weights by them.
    "qk-clip": ("tp2", replace(PRESETS["llama-tiny"], **CLIPPED), {}),
    "pipeline, offloaded state": ("pp2", GPT, {"optimizer_cpu_offload": True}),
    "tensor parallel, fp16": ("tp2+sp", replace(GPT, params_dtype="fp16"), {"loss_scale": 64.0}),
}


def _config(model: ModelConfig, **optimizer: Any) -> Config:
    return Config(
        model=model,
        data=DataConfig(mock_data=True),
        optimizer=OptimizerConfig(lr=1e-3, **optimizer),
        training=TrainingConfig(
            micro_batch_size=2,
            train_iters=NUM_ITERATIONS,
            eval_iters=1,
            eval_interval=SAVE_INTERVAL,
            check_for_spiky_loss=True,
        ),
    )


class Queueing(Callback):
    """Queues iterations or does not; evaluates and stops the run when no one expects it.

    Attributes:
        queued: whether the next iteration was queued after each one.
    """

    def __init__(self, queues_next: bool) -> None:
        self.queued: list[bool] = []
        self._queues_next = queues_next

    @contextmanager
    def running(self, loop: TrainingLoop) -> Iterator[None]:
        loop.queues_next = self._queues_next
        yield

    def needs_boundary(self, loop: TrainingLoop, iteration: int) -> bool:
        return False

    def after_step(self, loop: TrainingLoop, result: StepResult) -> None:
        self.queued.append(bool(loop.trainer.train_step.queued))
        if loop.iteration == LAST:
            loop.request_stop(Stop("the test stops the run"))

    def after_iteration(self, loop: TrainingLoop, result: StepResult) -> None:
        if loop.iteration == 1:
            loop.evaluate("test")


@dataclass
class Run:
    """What a rank has after a run; `metrics` and `saved` are of the reporting one."""

    queued: list[bool]
    warnings: list[str]
    metrics: list[dict[str, Any]] = field(default_factory=list)
    saved: dict[str, bytes] = field(default_factory=dict)


def _run(topology: Topology, config: Config, folder: Path, queues_next: bool) -> Run:
    save, metrics = folder / str(queues_next), folder / f"{queues_next}.jsonl"
    config = replace(
        config,
        checkpoint=CheckpointConfig(save=str(save), save_interval=SAVE_INTERVAL),
        logging=LoggingConfig(log_interval=1, metrics_file=str(metrics), log_params_norm=True),
    )
    stop = StopConditions(config.training, topology, StopSignals(RequeueNote(None)))
    queueing, warnings = Queueing(queues_next), list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    with Writers(config.logging, topology, "") as writers, start_trainer(config, topology) as trainer:
        for sample, change in ((2 * BATCH + 5, _with_nan), (4 * BATCH + 5, _with_nan_gradient)):
            _break(trainer, "layers.1.mlp", sample, change)
        train(trainer, stop, [queueing, *default_callbacks(writers, config)])
    log.removeHandler(handler)
    run = Run(queueing.queued, warnings)
    if topology.rank == 0:
        lines = map(json.loads, metrics.read_text().splitlines())
        run.metrics = [{name: line[name] for name in COMPARED if name in line} for line in lines]
        for iteration in (SAVE_INTERVAL, LAST):
            reader = FullReader(read_manifest(save / f"iter_{iteration:07}"))
            for tensor in reader.names():
                flat = reader.tensor(tensor).contiguous().view(-1)
                run.saved[f"{tensor} of {iteration}"] = flat.view(torch.uint8).numpy().tobytes()
    return run


@pytest.mark.parametrize("row", ROWS)
def test_queueing_changes_no_result(row: str, tmp_path: Path) -> None:
    """Test it bit by bit, with anomalies, evaluations, saves, and a stop while an iteration is queued."""
    name, model, optimizer = ROWS[row]
    layout = Layout.parse(name)
    config = layout.apply(_config(model, **optimizer), BATCH)
    for queues_next in (False, True):
        (tmp_path / str(queues_next)).mkdir()
    plain, queued = (
        run_ranks(_run, config.mesh, layout.world_size, config, tmp_path, queues_next)
        for queues_next in (False, True)
    )
    for before, now in zip(plain, queued, strict=True):
        assert not any(before.queued)
        # The results of the third and the fifth one are bad, and the fourth one is saved and evaluated.
        assert now.queued == [True, True, False, False, False, True]
        assert now.warnings == before.warnings
        assert now.metrics == before.metrics
        assert now.saved == before.saved
    assert sum("the update was skipped" in line for line in queued[-1].warnings) == 2
    assert len(queued[0].metrics) > LAST
