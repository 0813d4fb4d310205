"""Test the plan of each iteration, in a run counted in iterations and in one counted in samples."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.checkpoint.progress import TrainingProgress
from megalite.config import Config, OptimizerConfig, TrainingConfig
from megalite.config.presets import PRESETS
from megalite.train.train_step import IterationPlanner


def plans(config: Config, num_iterations: int) -> list[tuple[int, float, float, bool]]:
    planner, progress, found = IterationPlanner(config, dp=2), TrainingProgress(), []
    for _ in range(num_iterations):
        plan = planner(progress)
        assert plan.iteration == progress.iteration + 1
        found.append((plan.num_samples, plan.learning_rate, plan.weight_decay, plan.is_excluded))
        progress = progress.after(plan.num_samples)
    return found


def test_in_iterations() -> None:
    config = Config(
        optimizer=OptimizerConfig(lr=1.0, lr_warmup_iters=2, weight_decay=0.1),
        training=TrainingConfig(train_iters=4, micro_batch_size=3, iterations_to_skip=("2:3", "9")),
    )
    assert plans(config, 4) == [
        (6, 0.5, 0.1, False),
        (6, 1.0, 0.1, True),
        (6, 0.5, 0.1, True),
        (6, 0.0, 0.1, False),
    ]


def test_in_samples_as_megatron_counts_them() -> None:
    """Compare with Megatron's scheduler, which advances by each batch while a ramp-up increases it."""
    module = pytest.importorskip("megatron.core.optimizer_param_scheduler")

    class Nothing:
        param_groups = ()

    config = Config(
        optimizer=OptimizerConfig(
            lr=1e-3,
            min_lr=1e-5,
            lr_decay_style="cosine",
            lr_warmup_samples=100,
            lr_decay_samples=1500,
            weight_decay_incr_style="linear",
            start_weight_decay=0.1,
            end_weight_decay=0.3,
        ),
        training=TrainingConfig(train_samples=2000, global_batch_size=64, rampup_batch_size=(16, 8, 500)),
    )
    theirs = module.OptimizerParamScheduler(
        Nothing(),
        init_lr=0.0,
        max_lr=1e-3,
        min_lr=1e-5,
        lr_warmup_steps=100,
        lr_decay_steps=1500,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.3,
        wd_incr_steps=2000,
        wd_incr_style="linear",
    )
    found = plans(config, config.num_iterations(dp=2))
    assert found[0][0] == 16
    assert found[-1][0] == 64
    for num_samples, rate, decay, _ in found:
        theirs.step(num_samples)
        assert rate == pytest.approx(theirs.get_lr({}), rel=1e-15)
        assert decay == pytest.approx(theirs.get_wd(), rel=1e-15)
    assert 2000 - 64 < sum(num_samples for num_samples, *_ in found) <= 2000


def test_sequences_grow_at_the_first_iteration_from_a_number_of_tokens_on() -> None:
    """Iterations of 16 samples of 64 tokens; the second length begins within the third iteration."""
    config = Config(
        model=replace(PRESETS["gpt-tiny"], vocab_size=256, seq_length=64),
        training=TrainingConfig(
            global_batch_size=16, train_iters=6, seq_length_schedule=("0:8", "2.5K:32,5K:64")
        ),
    )
    planner, progress, found = IterationPlanner(config, 2), TrainingProgress(), []
    for _ in range(6):
        plan = planner(progress)
        assert (plan.num_samples, plan.num_sequences * plan.seq_length) == (16, 16 * 64)
        found.append(plan.seq_length)
        progress = progress.after(plan.num_samples)
    assert found == [8, 8, 8, 32, 32, 64]
