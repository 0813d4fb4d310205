"""The weight decay against Megatron's scheduler."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megalite.config import OptimizerConfig
from megalite.optim.parameter_schedules import OptimizerSchedules, WeightDecay

BATCH_SIZE = 24


@pytest.mark.parametrize("unit", ["iters", "samples"])
@pytest.mark.parametrize("length", [1, 40, 100])
@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_as_megatron_computes_it(style: str, length: int, unit: str) -> None:
    """Compare every iteration with Megatron's scheduler, which counts samples in both units."""
    module = pytest.importorskip("megatron.core.optimizer_param_scheduler")
    ends = {"weight_decay": 0.3}
    if style != "constant":
        ends = {"start_weight_decay": 0.01, "end_weight_decay": 0.3}
    theirs = module.OptimizerParamScheduler(
        SimpleNamespace(param_groups=()),
        init_lr=0.0,
        max_lr=1.0,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=1,
        lr_decay_style="constant",
        start_wd=ends.get("start_weight_decay", 0.3),
        end_wd=0.3,
        wd_incr_steps=length * BATCH_SIZE,
        wd_incr_style=style,
    )
    samples = BATCH_SIZE if unit == "samples" else 1  # per iteration, in the unit
    config = OptimizerConfig(
        weight_decay_incr_style=style, **ends, **{f"weight_decay_incr_{unit}": length * samples}
    )
    ours = OptimizerSchedules(config, 60 * samples, unit, BATCH_SIZE).weight_decay
    for iteration in range(1, 60):
        theirs.step(BATCH_SIZE)
        assert ours(iteration * samples) == pytest.approx(theirs.get_wd(), rel=1e-14)


def test_a_constant_one_is_the_configs():
    assert WeightDecay(OptimizerConfig(weight_decay=0.2), 10)(3) == 0.2
