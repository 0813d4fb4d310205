"""The same run by any attention backend, in layouts too: other tables leave the choice to auto."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from megalite.config import Config, DataConfig, OptimizerConfig, RecomputeConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.observe.verify.compare_runs import TOLERANCES, compare
from megalite.observe.verify.record_run import RunRecord
from tests.parity.models import run_alone, run_in

NUM_ITERATIONS, GLOBAL_BATCH_SIZE = 2, 8


def _config(model: str, backend: str, packed: bool) -> Config:
    shape = PRESETS[model]
    return Config(
        model=replace(
            shape,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            attention_backend=backend,  # type: ignore[arg-type]
            vocab_size=200,
            params_dtype="fp64",
            seq_length=40,
        ),
        optimizer=OptimizerConfig(lr=3e-3, lr_decay_style="constant"),
        data=DataConfig(mock_data=True, reset_attention_mask=packed, reset_position_ids=packed),
        training=TrainingConfig(
            micro_batch_size=2,
            global_batch_size=GLOBAL_BATCH_SIZE,
            train_iters=NUM_ITERATIONS,
            eval_iters=0,
        ),
    )


@functools.cache
def _reference(model: str, packed: bool) -> RunRecord:
    return run_alone(_config(model, "flash", packed), NUM_ITERATIONS)


@pytest.mark.parametrize(
    ("model", "packed"), [("gpt-tiny", False), ("bloom-tiny", True), ("llama-tiny", True)]
)
def test_unfused_trains_what_flash_trains(model: str, packed: bool) -> None:
    run = run_in("mbs2", _config(model, "unfused", packed), NUM_ITERATIONS)
    assert not compare(run, _reference(model, packed)).excesses(TOLERANCES["fp64"])


@pytest.mark.parametrize(
    ("backend", "name"),
    [("unfused", "tp2"), ("flash", "tp2"), pytest.param("unfused", "tp2pp2dp2", marks=pytest.mark.slow)],
)
def test_same_run_in_a_layout(backend: str, name: str) -> None:
    """Key/value heads are shared, weights of attention recomputed, documents packed."""
    config = replace(
        _config("llama-tiny", backend, True),
        recompute=RecomputeConfig(recompute_granularity="selective", recompute_modules=("core_attn",)),
    )
    run = run_in(name, config, NUM_ITERATIONS)
    assert not compare(run, _reference("llama-tiny", True)).excesses(TOLERANCES["fp64"])
