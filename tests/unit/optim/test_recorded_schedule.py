"""What a checkpoint records of the schedule gives it back."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from megalite.config import Config, OptimizerConfig, TrainingConfig
from megalite.optim.parameter_schedules import OptimizerSchedules

RUN = TrainingConfig(train_iters=100)
CONFIGS: dict[str, OptimizerConfig] = {
    "linear": OptimizerConfig(lr_warmup_iters=10, min_lr=1e-5),
    "constant": OptimizerConfig(lr_decay_style="constant", lr_warmup_fraction=0.125, lr_warmup_init=1e-6),
    "wsd": OptimizerConfig(lr_decay_style="WSD", lr_wsd_decay_iters=20, lr_wsd_decay_style="cosine"),
    "cosine": OptimizerConfig(lr_decay_style="cosine", lr_decay_iters=70),
    "log": OptimizerConfig(lr_warmup_iters=10, lr_warmup_style="log"),
    "deepspeed": OptimizerConfig(lr_decay_style="cosine", lr_warmup_iters=10, lr_step_timing="deepspeed"),
    "decoupled": OptimizerConfig(decoupled_lr=1e-2, decoupled_min_lr=1e-3),
    "decoupled, one minimum": OptimizerConfig(decoupled_lr=1e-2, min_lr=1e-4),
    "decoupled, constant": OptimizerConfig(decoupled_lr=1e-2, lr_decay_style="constant"),
    "weight decay": OptimizerConfig(
        weight_decay_incr_style="linear", start_weight_decay=0.01, end_weight_decay=0.2
    ),
    "short weight decay": OptimizerConfig(
        weight_decay_incr_style="cosine",
        start_weight_decay=0.0,
        end_weight_decay=0.2,
        weight_decay_incr_iters=40,
    ),
}


def courses(schedule: OptimizerSchedules) -> list[tuple[float, float, float | None]]:
    own = schedule.decoupled_learning_rate
    return [
        (schedule.learning_rate(at), schedule.weight_decay(at), own(at) if own else None)
        for at in range(1, 130)
    ]


@pytest.mark.parametrize("name", CONFIGS)
def test_its_record_makes_a_longer_run_follow_it(name: str) -> None:
    saved = OptimizerSchedules.of(Config(optimizer=CONFIGS[name], training=RUN), 1)
    longer = OptimizerSchedules.of(
        Config(
            optimizer=OptimizerConfig(lr=1.0, decoupled_lr=0.5, decoupled_min_lr=0.25),
            training=replace(RUN, train_iters=400),
        ),
        1,
    )
    assert courses(longer) != courses(saved)
    fields = json.loads(json.dumps(saved.fields()))
    taken = longer.with_fields(fields)
    assert courses(taken) == courses(saved)
    assert taken.fields() == fields


@pytest.mark.parametrize(
    "config",
    [
        OptimizerConfig(lr_decay_iters=100),
        OptimizerConfig(lr_warmup_fraction=0.0),
        OptimizerConfig(lr_wsd_decay_iters=7),
        OptimizerConfig(adam_beta1=0.5, clip_grad=3.0),
    ],
)
def test_what_has_no_effect_is_no_difference(config: OptimizerConfig) -> None:
    other = OptimizerSchedules.of(Config(optimizer=config, training=RUN), 1)
    assert other.fields() == OptimizerSchedules.of(Config(training=RUN), 1).fields()


def test_only_what_depends_on_it_follows_the_length_of_the_run() -> None:
    constant = OptimizerConfig(lr_decay_style="constant")
    for config, is_free in ((constant, True), (OptimizerConfig(), False)):
        short, long = (
            OptimizerSchedules.of(Config(optimizer=config, training=TrainingConfig(train_iters=length)), 1)
            for length in (10, 20)
        )
        assert (short.fields() == long.fields()) is is_free


@pytest.mark.parametrize(
    "change",
    [
        {"lr": "fast"},
        {"lr": None},
        {"lr": -1.0},
        {"lr": float("nan")},
        {"lr_decay_style": "x"},
        {"lr_decay_style": ["linear"]},
        {"adam_beta1": 2.0},
        {"unknown": 1},
        {"lr_decay_iters": 0},
        {"lr_decay_samples": 5},
    ],
    ids=str,
)
def test_a_damaged_record_is_refused(change: dict[str, Any]) -> None:
    schedule = OptimizerSchedules.of(Config(training=RUN), 1)
    with pytest.raises(ValueError, match="its schedule is damaged"):
        schedule.with_fields(schedule.fields() | change)
