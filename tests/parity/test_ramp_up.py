"""A ramp-up is the same run in any layout, and so is what follows a run counted in samples."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from megalite.config import Config, DataConfig, OptimizerConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.observe.verify.compare_runs import TOLERANCES, compare
from megalite.observe.verify.record_run import RunRecord
from tests.live_ranks import record_run
from tests.parity.models import run_in

BATCHES = [4, 4, 8, 12, 16]
CONFIG = Config(
    model=replace(
        PRESETS["gpt-tiny"],
        vocab_size=256,
        seq_length=32,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        params_dtype="fp64",
    ),
    optimizer=OptimizerConfig(
        lr=3e-3,
        lr_warmup_samples=10,
        weight_decay_incr_style="linear",
        start_weight_decay=0.1,
        end_weight_decay=0.5,
    ),
    data=DataConfig(mock_data=True),
    training=TrainingConfig(
        micro_batch_size=2,
        global_batch_size=16,
        rampup_batch_size=(4, 4, 24),
        train_samples=sum(BATCHES),
        eval_iters=0,
    ),
)


@functools.cache
def _reference() -> RunRecord:
    return record_run(CONFIG, len(BATCHES), 1)


def test_the_batches_grow() -> None:
    batch_size = CONFIG.batch_size(1)
    assert [batch_size(sum(BATCHES[:i])) for i in range(len(BATCHES))] == BATCHES
    assert CONFIG.num_iterations(1) == CONFIG.num_iterations(2) == len(BATCHES)


@pytest.mark.parametrize("name", [pytest.param("dp2", marks=pytest.mark.slow), "tp2pp2", "dp2mbs1"])
def test_same_run(name: str) -> None:
    run = run_in(name, CONFIG, len(BATCHES))
    assert not compare(run, _reference()).excesses(TOLERANCES["fp64"])


def test_the_ramp_up_makes_a_difference() -> None:
    """What is compared does depend on the batches: it could tell a difference."""
    other = replace(CONFIG, training=replace(CONFIG.training, rampup_batch_size=None))
    comparison = compare(record_run(other, len(BATCHES), 1), _reference())
    assert comparison.excesses(TOLERANCES["fp64"])
