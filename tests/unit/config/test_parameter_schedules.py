"""Learning rate and weight decay: by hand, as Megatron computes them, and as checkpoints record them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.config import Config, OptimizerConfig, TrainingConfig
from megalite.config.parameter_schedules import LearningRate, OptimizerSchedules, WeightDecay


def rates(train_iters: int = 100, **options) -> LearningRate:
    return LearningRate(OptimizerConfig(**options), train_iters)


def test_the_published_run():
    """Its log line of iteration 100 says 5.822E-05; the warm-up ends at 8 of 800."""
    rate = rates(lr=6e-5, min_lr=6e-6, lr_decay_style="cosine", lr_decay_iters=800, lr_warmup_fraction=0.01)
    assert f"{rate(100):.3E}" == "5.822E-05"
    assert rate(4) == pytest.approx(3e-5, rel=1e-15)
    assert rate(8) == 6e-5
    assert rate(404) == pytest.approx(3.3e-5, rel=1e-15)  # half-way from 8 to 800
    assert rate(800) == pytest.approx(6e-6, rel=1e-15)
    assert rate(801) == 6e-6


HALF_WAY = {
    "linear": 0.6,
    "cosine": 0.6,
    "constant": 1.0,
    "inverse-square-root": math.sqrt(20 / 60),
    "WSD": 1.0,
}
END = {"linear": 0.2, "cosine": 0.2, "constant": 1.0, "inverse-square-root": math.sqrt(20 / 100), "WSD": 0.2}


@pytest.mark.parametrize("style", HALF_WAY)
def test_each_style_at_its_edges(style):
    """Peak 1, minimum 0.2, warm-up from 0.1 to iteration 20, decay to iteration 100."""
    rate = rates(
        lr=1.0,
        min_lr=0.2,
        lr_decay_style=style,
        lr_warmup_iters=20,
        lr_warmup_init=0.1,
        lr_wsd_decay_iters=30,
        lr_decay_iters=100,
        train_iters=500,
    )
    assert rate(1) == pytest.approx(0.145)
    assert rate(10) == pytest.approx(0.55)
    assert rate(20) == 1.0
    assert rate(60) == pytest.approx(HALF_WAY[style])
    assert rate(100) == pytest.approx(END[style])
    assert rate(101) == rate(500) == (1.0 if style == "constant" else 0.2)


@pytest.mark.parametrize(
    ("style", "share"),
    [
        ("linear", 1 / 4),
        ("cosine", 0.5 - math.sqrt(2) / 4),
        ("exponential", 2 ** (1 / 4) - 1),
        ("minus_sqrt", 1 - math.sqrt(3) / 2),
    ],
)
def test_the_last_part_of_wsd(style, share):
    """Peak 1 to iteration 60, then down to 0 at iteration 100; told at three quarters of the way."""
    rate = rates(lr=1.0, lr_decay_style="WSD", lr_wsd_decay_style=style, lr_wsd_decay_iters=40)
    assert rate(60) == 1.0 > rate(61)
    assert rate(90) == pytest.approx(share, rel=1e-14)
    assert rate(100) == pytest.approx(0.0, abs=1e-15)


def test_without_warmup_the_first_iteration_has_begun_to_decay():
    assert rates(lr=1.0)(1) == pytest.approx(0.99)
    assert rates(lr=1.0, lr_decay_style="constant")(1) == 1.0
    assert rates(lr=1.0, lr_decay_style="inverse-square-root")(4) == 0.5


def test_a_warmup_of_a_fraction_need_not_end_on_an_iteration():
    rate = rates(lr=1.0, lr_warmup_fraction=0.025)  # to iteration 2.5 of 100
    assert rate(2) == pytest.approx(0.8)
    assert rate(3) == pytest.approx(1 - 0.5 / 97.5)


@st.composite
def settings(draw):
    decay = draw(st.integers(2, 300))
    lr = draw(st.floats(1e-6, 1.0))
    warmup = draw(st.integers(0, decay - 1))
    return OptimizerConfig(
        lr=lr,
        min_lr=lr * draw(st.floats(0.0, 1.0)),
        lr_warmup_init=lr * draw(st.floats(0.0, 1.0)),
        lr_warmup_iters=warmup,
        lr_decay_iters=decay,
        lr_decay_style=draw(st.sampled_from(["linear", "cosine", "constant", "inverse-square-root", "WSD"])),
        lr_wsd_decay_style=draw(st.sampled_from(["linear", "cosine", "exponential", "minus_sqrt"])),
        lr_wsd_decay_iters=draw(st.integers(1, decay)),
    )


@given(settings())
def test_up_to_the_peak_then_down_and_within_bounds(config):
    rate = LearningRate(config, run_length=1)
    course = [rate(iteration) for iteration in range(1, config.lr_decay_iters + 3)]
    rounding = 1e-15 * config.lr
    rise, fall = course[: config.lr_warmup_iters], course[config.lr_warmup_iters :]
    assert all(earlier <= later + rounding for earlier, later in pairwise(rise))
    assert all(earlier + rounding >= later for earlier, later in pairwise(fall))
    assert all(config.lr_warmup_init <= value <= config.lr + rounding for value in rise)
    assert all(config.min_lr - rounding <= value <= config.lr + rounding for value in fall)


MEGATRON_STYLES = [
    *((style, "exponential") for style in ("linear", "cosine", "constant", "inverse-square-root")),
    *(("WSD", style) for style in ("linear", "cosine", "exponential", "minus_sqrt")),
]
MEGATRON_WARMUPS = {
    "none": {},
    "1 iteration": {"warmup": 1},
    "7 iterations": {"warmup": 7},
    "7 iterations from a rate": {"warmup": 7, "lr_warmup_init": 1e-6},
    "all but one": {"warmup": 49},
    "a fraction": {"lr_warmup_fraction": 0.15},
    "a fraction of 0": {"lr_warmup_fraction": 0.0},
    "half an iteration": {"lr_warmup_fraction": 0.01},
    "less than a sample": {"lr_warmup_fraction": 1e-4},
}
BATCH_SIZE = 24


def megatrons(**options: Any) -> Any:
    """Return Megatron's scheduler; without options, of a constant weight decay and learning rate."""
    module = pytest.importorskip("megatron.core.optimizer_param_scheduler")
    constant = {
        "init_lr": 0.0, "max_lr": 1.0, "min_lr": 0.0, "lr_warmup_steps": 0, "lr_decay_steps": 1,
        "lr_decay_style": "constant",
        "start_wd": 0.0, "end_wd": 0.0, "wd_incr_steps": 1, "wd_incr_style": "constant",
    }  # fmt: skip
    return module.OptimizerParamScheduler(SimpleNamespace(param_groups=()), **constant | options)


@pytest.mark.parametrize("unit", ["iters", "samples"])
@pytest.mark.parametrize("warmup", MEGATRON_WARMUPS)
@pytest.mark.parametrize(("style", "wsd_style"), MEGATRON_STYLES)
def test_as_megatron_computes_it(style: str, wsd_style: str, warmup: str, unit: str) -> None:
    """Compare every iteration with Megatron's scheduler, which counts samples in both units."""
    samples = BATCH_SIZE if unit == "samples" else 1  # per step of the unit
    options = dict(MEGATRON_WARMUPS[warmup])
    iters = options.pop("warmup", 0)
    config = OptimizerConfig(
        lr=3e-4,
        min_lr=2e-5,
        lr_decay_style=style,
        lr_wsd_decay_style=wsd_style,
        **options,
        **{f"lr_warmup_{unit}": iters * samples, f"lr_decay_{unit}": 50 * samples},
        **{f"lr_wsd_decay_{unit}": 11 * samples},
    )
    ours = LearningRate(config, 60 * samples, unit, BATCH_SIZE)
    decay = 50 * BATCH_SIZE
    fraction = config.lr_warmup_fraction
    theirs = megatrons(
        init_lr=config.lr_warmup_init,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=iters * BATCH_SIZE if fraction is None else fraction * decay,
        lr_decay_steps=decay,
        lr_decay_style=style,
        wsd_decay_steps=11 * BATCH_SIZE,
        lr_wsd_decay_style=wsd_style,
    )
    for iteration in range(1, 60):
        theirs.step(BATCH_SIZE)
        assert ours(iteration * samples) == pytest.approx(theirs.get_lr({}), rel=1e-12)


@pytest.mark.parametrize("unit", ["iters", "samples"])
@pytest.mark.parametrize("length", [1, 40, 100])
@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_weight_decay_as_megatron_computes_it(style: str, length: int, unit: str) -> None:
    """Compare every iteration with Megatron's scheduler, which counts samples in both units."""
    ends = {"weight_decay": 0.3}
    if style != "constant":
        ends = {"start_weight_decay": 0.01, "end_weight_decay": 0.3}
    theirs = megatrons(
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


def test_a_constant_weight_decay_is_the_configs():
    assert WeightDecay(OptimizerConfig(weight_decay=0.2), 10)(3) == 0.2


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
