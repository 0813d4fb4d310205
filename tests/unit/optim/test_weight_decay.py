"""The weight decay against Megatron's scheduler."""

from __future__ import annotations

import pytest

from megalite.config import OptimizerConfig
from megalite.optim.parameter_schedules import WeightDecay


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_as_megatron_computes_it(style) -> None:
    module = pytest.importorskip("megatron.core.optimizer_param_scheduler")

    class Nothing:
        param_groups = ()

    theirs = module.OptimizerParamScheduler(
        Nothing(),
        init_lr=0.0,
        max_lr=1.0,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=1,
        lr_decay_style="constant",
        start_wd=0.01,
        end_wd=0.3,
        wd_incr_steps=700,
        wd_incr_style=style,
    )
    config = OptimizerConfig(weight_decay_incr_style=style, start_weight_decay=0.01, end_weight_decay=0.3)
    ours = WeightDecay(config, 700)
    for position in range(1, 800):
        theirs.num_steps = position
        assert ours(position) == pytest.approx(theirs.get_wd(), rel=1e-15)
    assert (ours(0), ours(700), ours(800)) == (0.01, 0.3, 0.3)


def test_a_constant_one_is_the_configs():
    assert WeightDecay(OptimizerConfig(weight_decay=0.2), 10)(3) == 0.2
