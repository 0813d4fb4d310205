"""The loss scale's course is Megatron's, and gradients alone feel it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalite.config import OptimizerConfig
from megalite.config.optimizer import MAX_LOSS_SCALE
from megalite.config.validate import problems_of
from megalite.frontends.command_line import parse
from megalite.optim.gradient_scale import LossScaler, build_loss_scaler


def course(scaler: LossScaler, overflows) -> list[float]:
    scales = []
    for overflowed in overflows:
        scaler.update(overflowed)
        scales.append(scaler.scale)
    return scales


def test_a_course_worked_out_by_hand():
    config = OptimizerConfig(initial_loss_scale=8.0, min_loss_scale=2.0, loss_scale_window=3, hysteresis=2)
    scaler = build_loss_scaler(config, torch.float16)
    outcomes = [True, True, True, True, False, True, False, False, False, True, True]
    assert course(scaler, outcomes) == [8, 4, 2, 2, 2, 2, 2, 2, 4, 4, 2]


def test_an_overflow_is_the_scales_doing_until_it_cannot_go_down():
    config = OptimizerConfig(initial_loss_scale=8.0, min_loss_scale=4.0, hysteresis=1)
    scaler = build_loss_scaler(config, torch.float16)
    assert scaler.can_go_down
    scaler.update(True)
    assert not scaler.can_go_down
    assert not LossScaler(8.0).can_go_down


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5), st.integers(1, 4))
def test_as_megatron_moves_it(outcomes, window, hysteresis):
    module = pytest.importorskip("megatron.core.optimizer.grad_scaler")
    config = OptimizerConfig(
        initial_loss_scale=8.0, min_loss_scale=4.0, loss_scale_window=window, hysteresis=hysteresis
    )
    with pytest.MonkeyPatch.context() as patch:  # Megatron's is made on a GPU
        make = torch.tensor
        patch.setattr(torch, "tensor", lambda values, dtype, device: make(values, dtype=dtype))
        theirs = module.DynamicGradScaler(8.0, 4.0, 2.0, 0.5, window, hysteresis)
    expected = []
    for overflowed in outcomes:
        theirs.update(overflowed)
        expected.append(theirs.scale.item())
    assert course(build_loss_scaler(config, torch.float16), outcomes) == expected


def test_a_resumed_scaler_goes_on_where_it_was():
    config = OptimizerConfig(initial_loss_scale=64.0, loss_scale_window=4, hysteresis=3)
    outcomes = [False, True, True, False, False, True, False, False, False, False, True]
    straight = build_loss_scaler(config, torch.float16)
    scales = course(straight, outcomes)
    for middle in range(len(outcomes)):
        first, second = (build_loss_scaler(config, torch.float16) for _ in range(2))
        course(first, outcomes[:middle])
        for name, tensor in second.state().items():
            tensor.copy_(first.state()[name])
        assert course(second, outcomes[middle:]) == scales[middle:]


def test_the_scale_stops_before_it_is_infinite():
    """Gradients that are zero for long, of frozen weights for instance, never overflow."""
    config = OptimizerConfig(initial_loss_scale=2.0**60, loss_scale_window=1, hysteresis=1)
    scaler = build_loss_scaler(config, torch.float16)
    scales = course(scaler, [False] * 200)
    assert scales[:5] == [2.0**61, 2.0**62, 2.0**63, 2.0**64, 2.0**64]
    assert set(scales[4:]) == {MAX_LOSS_SCALE}
    assert course(scaler, [True, False]) == [2.0**63, 2.0**64]


@pytest.mark.parametrize("saved", [math.inf, 2.0**100])
def test_a_scale_that_an_older_version_saved_comes_down(saved):
    config = OptimizerConfig(hysteresis=1)
    scaler = build_loss_scaler(config, torch.float16)
    scaler.state()["scale"].fill_(saved)
    assert scaler.scale == MAX_LOSS_SCALE
    assert course(scaler, [True, False]) == [2.0**63, 2.0**63]
    scaler.state()["scale"].fill_(2.0**20)
    assert scaler.scale == 2.0**20


@pytest.mark.parametrize("flag", ["--loss-scale", "--initial-loss-scale"])
def test_a_scale_above_the_largest_is_refused(flag):
    config, _ = parse(["--fp16", flag, str(2.0**65)])
    assert any(
        f"{flag} {2.0**65} is out of range: it must be gr" in problem for problem in problems_of(config, 1)
    )
    config, _ = parse(["--fp16", flag, str(2.0**64)])
    assert not any(flag in problem for problem in problems_of(config, 1))


def test_constant_scales():
    config = OptimizerConfig(loss_scale=12.0)
    assert course(build_loss_scaler(config, torch.float16), [True] * 5) == [12.0] * 5
    assert course(build_loss_scaler(config, torch.bfloat16), [True, False]) == [1.0, 1.0]
    assert build_loss_scaler(config, torch.float16).state() == {}
