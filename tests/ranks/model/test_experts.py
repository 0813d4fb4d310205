"""Jitter and dropped tokens are the same in every layout."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.config import Config, DataConfig, OptimizerConfig, TrainingConfig
from megalite.observe.verify.compare_runs import TOLERANCES, compare
from megalite.observe.verify.layouts import Layout, layouts_named
from tests.live_ranks import record_run
from tests.ranks.model.test_expert_dispatch import CONFIG


@pytest.mark.parametrize(
    ("policy", "factor", "names"),
    [("probs", 1.0, "tp2+sp,cp2,dp2ep2"), ("position", 0.6, "tp2+sp+full,cp2,dp2ep2,mbs2")],
)
def test_every_layout_drops_the_same_tokens(policy: str, factor: float, names: str) -> None:
    fields = {"moe_expert_capacity_factor": factor, "moe_token_drop_policy": policy}
    config = Config(
        model=replace(CONFIG, moe_input_jitter_eps=0.1, **fields),
        optimizer=OptimizerConfig(lr=1e-3),
        data=DataConfig(mock_data=True),
        training=TrainingConfig(micro_batch_size=1, global_batch_size=4, train_iters=2, eval_iters=0),
    )
    alone = Layout().apply(config, 4)
    reference = record_run(alone, 1, 1)
    for layout in layouts_named(names, config):
        run = record_run(layout.apply(config, 4), 1, layout.world_size)
        assert compare(run, reference).excesses(TOLERANCES["fp64"]) == [], layout
    for dropless in ({"moe_expert_capacity_factor": None}, {"moe_input_jitter_eps": None}):
        other = record_run(replace(alone, model=replace(alone.model, **dropless)), 1, 1)
        assert compare(other, reference).excesses(TOLERANCES["fp64"])  # both have an effect
