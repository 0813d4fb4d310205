"""Test which rank's state of a callback is saved, and that every rank of another layout loads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megalite.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
)
from megalite.distributed.topology import Topology
from megalite.train.loop import Callback, Checkpointing, TrainingLoop, train
from megalite.train.stopping import RequeueNote, StopConditions, StopSignals
from megalite.train.trainer import start_trainer
from tests.live_ranks import run_ranks


class RankNumbers(Callback):
    """Collects the number of the rank in each run, which is not the same on every rank."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def on_start(self, loop: TrainingLoop) -> None:
        self.numbers.append(loop.trainer.topology.rank)

    def state(self) -> dict[str, Any]:
        return {"numbers": self.numbers}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.numbers = state["numbers"]


def _numbers(topology: Topology, config: Config) -> list[int]:
    """Train to the last iteration, and return the numbers."""
    stop_conditions = StopConditions(config.training, topology, StopSignals(RequeueNote(None)))
    with start_trainer(config, topology) as trainer:
        loaded = trainer.load()
        callback = RankNumbers()
        train(trainer, stop_conditions, [callback, Checkpointing()], loaded and loaded.callbacks)
    return callback.numbers


def test_every_rank_loads_the_state_of_rank_0(tmp_path: Path) -> None:
    config = Config(
        model=ModelConfig(num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=8, vocab_size=32),
        parallel=ParallelConfig(tensor_model_parallel_size=2),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(global_batch_size=2, train_iters=1, eval_iters=0),
        optimizer=OptimizerConfig(lr_decay_style="constant"),
        checkpoint=CheckpointConfig(save=str(tmp_path), load=str(tmp_path)),
    )
    assert run_ranks(_numbers, config.parallel.mesh, 2, config) == [[0], [1]]
    longer = replace(config, training=replace(config.training, train_iters=2))
    pipeline = replace(longer, parallel=ParallelConfig(pipeline_model_parallel_size=2))
    assert run_ranks(_numbers, pipeline.parallel.mesh, 2, pipeline) == [[0, 0], [0, 1]]
