"""The rank that computes slowest is named, along whichever axis its peers wait for it."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from megalite.config import Config, DataConfig, LoggingConfig, ParallelConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.distributed.topology import Topology
from megalite.train.callbacks.straggler import Stragglers
from megalite.train.loop import TrainingLoop
from megalite.train.stopping import RequeueNote, StopConditions, StopSignals
from megalite.train.trainer import start_trainer
from megalite.utils.log import log
from tests.live_ranks import run_ranks

NUM_ITERATIONS = 2
CONFIG = Config(
    model=replace(PRESETS["gpt-tiny"], num_layers=2, vocab_size=256, seq_length=16),
    data=DataConfig(mock_data=True),
    training=TrainingConfig(global_batch_size=2, train_iters=NUM_ITERATIONS, eval_iters=0),
    logging=LoggingConfig(log_straggler_interval=NUM_ITERATIONS),
)
EXTRA_SECONDS = 0.05
"""Of a slow rank in each of its forward passes: many times the time of a whole iteration."""


def _lines(topology: Topology, config: Config, slow: int) -> list[str]:
    """Return the lines that this rank logs in a run in which one rank is slow."""
    lines: list[str] = []
    log.setLevel("INFO")
    log.addFilter(lambda record: lines.append(record.getMessage()) or True)  # type: ignore[func-returns-value]
    with start_trainer(config, topology) as trainer:
        if topology.rank == slow:
            trainer.chunks[0].register_forward_pre_hook(_compute)
        stop_conditions = StopConditions(config.training, topology, StopSignals(RequeueNote(None)))
        TrainingLoop(trainer, stop_conditions, [Stragglers()]).run()
        return lines


def _compute(*_: Any) -> None:
    """Compute for a while by the thread's clock, which a load of the machine does not shorten."""
    end = time.thread_time() + EXTRA_SECONDS
    while time.thread_time() < end:
        torch.ones(64, 64) @ torch.ones(64, 64)


@pytest.mark.parametrize(
    ("layout", "slow"),
    [
        pytest.param(ParallelConfig(2, 1, 1), 1, id="tp"),
        pytest.param(ParallelConfig(1, 1, 2), 0, id="dp"),
        pytest.param(ParallelConfig(1, 2, 1), 1, id="pp", marks=pytest.mark.slow),
        pytest.param(ParallelConfig(2, 1, 2), 2, id="tp dp", marks=pytest.mark.slow),
        pytest.param(ParallelConfig(1, 2, 2), 1, id="pp dp", marks=pytest.mark.slow),
    ],
)
def test_the_slow_rank_is_named(layout: ParallelConfig, slow: int) -> None:
    dp = layout.data_parallel_size or 1
    found = run_ranks(_lines, layout.mesh, layout.tp * layout.pp * dp, replace(CONFIG, parallel=layout), slow)
    (line,) = (line for line in found[-1] if line.startswith("straggler"))
    coordinates = f"pp {slow // (layout.tp * dp)} dp {slow // layout.tp % dp} tp {slow % layout.tp}"
    assert re.match(rf"straggler: rank {slow} \(\S+, {coordinates}\) computes \d+\.\d ms an iteration", line)
    assert not any("straggler" in line for other in found[:-1] for line in other)
