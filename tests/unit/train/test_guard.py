"""Which iterations the guard stops."""

from __future__ import annotations

import math

import pytest
import torch

from megalite.config import TrainingConfig
from megalite.train.guard import MIN_LOSSES, Guard

SPIKES = TrainingConfig(check_for_spiky_loss=True, spiky_loss_factor=3.0)
RECENT = tuple(float(i) for i in range(1, 12))  # median 6


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite(loss: float) -> None:
    fault = Guard(TrainingConfig()).fault(loss, 1.0, ())
    assert fault is not None
    assert (fault.kind, fault.what) == ("loss", f"the loss is {loss}")
    assert Guard(TrainingConfig(check_for_nan_in_loss_and_grad=False)).fault(loss, 1.0, ()) is None


def test_a_gradient_that_is_not_finite_unless_that_is_how_the_loss_scale_is_found() -> None:
    fault = Guard(TrainingConfig()).fault(1.0, math.inf, ())
    assert fault is not None
    assert (fault.kind, fault.what) == ("gradient", "the grad norm is inf")
    assert Guard(TrainingConfig()).fault(1.0, math.inf, (), may_overflow=True) is None
    assert Guard(TrainingConfig()).fault(math.nan, math.nan, (), may_overflow=True) is not None


def test_a_spike_is_above_the_factor_times_the_median() -> None:
    guard = Guard(SPIKES)
    assert guard.fault(18.0, 1.0, RECENT) is None
    fault = guard.fault(18.1, 1.0, RECENT)
    assert fault is not None
    assert fault.kind == "spike"
    assert fault.what == "the loss 18.1 is above 3 times 6, the median of the last 11"
    assert guard.fault(18.1, 1.0, RECENT[: MIN_LOSSES - 1]) is None
    assert Guard(TrainingConfig()).fault(1e9, 1.0, RECENT) is None


@pytest.mark.parametrize("checks_nan", [True, False])
@pytest.mark.parametrize("checks_spikes", [True, False])
@pytest.mark.parametrize("recent", [RECENT, RECENT[: MIN_LOSSES - 1]])
def test_the_device_leaves_out_what_the_host_finds_fault_with(checks_nan, checks_spikes, recent) -> None:
    config = TrainingConfig(
        check_for_nan_in_loss_and_grad=checks_nan,
        check_for_spiky_loss=checks_spikes,
        spiky_loss_factor=3.0,
    )
    guard = Guard(config)
    for loss in (-math.inf, -1.0, 0.0, 17.9, 18.0, math.nextafter(18.0, 19.0), 1e300, math.inf, math.nan):
        allowed = guard.allows(torch.tensor(loss, dtype=torch.float64), recent)
        assert allowed.item() is (guard.fault(loss, 1.0, recent) is None), loss


def test_what_later_losses_are_told_by() -> None:
    guard = Guard(SPIKES)
    assert guard.kept(2.0) == (2.0,)
    assert guard.kept(math.nan) == ()
    assert Guard(TrainingConfig()).kept(2.0) == ()
