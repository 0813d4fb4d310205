"""The layout table of megalite/experiments: each trains the same run in any layout."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite import Providers
from megalite.config import Config, DataConfig, OptimizerConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.experiments.depth_scaled_norms import DepthScaledGPT
from megalite.model.stage import StageProvider
from megalite.observe.verify.compare_runs import TOLERANCES, compare
from megalite.observe.verify.layouts import Layout
from tests.live_ranks import record_run

CONFIG = Config(
    model=replace(PRESETS["gpt-tiny"], vocab_size=200, params_dtype="fp64", seq_length=32),
    optimizer=OptimizerConfig(lr=3e-3, lr_decay_style="constant"),
    data=DataConfig(mock_data=True),
    training=TrainingConfig(micro_batch_size=2, global_batch_size=4, train_iters=2, eval_iters=1),
)


@pytest.mark.parametrize(("model", "layout"), [(DepthScaledGPT, "tp2pp2+sp")])
def test_same_run(model: StageProvider, layout: str) -> None:
    chosen, providers = Layout.parse(layout), Providers(model=model)
    run = record_run(chosen.apply(CONFIG, 4), 2, chosen.world_size, providers)
    assert not compare(run, record_run(CONFIG, 2, 1, providers)).excesses(TOLERANCES["fp64"])
