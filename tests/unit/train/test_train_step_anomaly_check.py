"""Test which updates the anomaly check skips."""

from __future__ import annotations

import math

import pytest
import torch

from megalite.config import TrainingConfig
from megalite.train.train_step import MIN_LOSSES, AnomalyCheck

SPIKES = TrainingConfig(check_for_spiky_loss=True, spiky_loss_factor=3.0)
RECENT = tuple(float(i) for i in range(1, 12))  # median 6


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite(loss: float) -> None:
    anomaly = AnomalyCheck(TrainingConfig()).find(loss, 1.0, ())
    assert anomaly is not None
    assert (anomaly.kind, anomaly.what) == ("loss", f"the loss is {loss}")
    assert AnomalyCheck(TrainingConfig(check_for_nan_in_loss_and_grad=False)).find(loss, 1.0, ()) is None


def test_a_gradient_that_is_not_finite_unless_that_is_how_the_loss_scale_is_found() -> None:
    anomaly = AnomalyCheck(TrainingConfig()).find(1.0, math.inf, ())
    assert anomaly is not None
    assert (anomaly.kind, anomaly.what) == ("gradient", "the grad norm is inf")
    assert AnomalyCheck(TrainingConfig()).find(1.0, math.inf, (), may_overflow=True) is None
    assert AnomalyCheck(TrainingConfig()).find(math.nan, math.nan, (), may_overflow=True) is not None


def test_a_spike_is_above_the_factor_times_the_median() -> None:
    check = AnomalyCheck(SPIKES)
    assert check.find(18.0, 1.0, RECENT) is None
    anomaly = check.find(18.1, 1.0, RECENT)
    assert anomaly is not None
    assert anomaly.kind == "spike"
    assert anomaly.what == "the loss 18.1 is above 3 times 6, the median of the last 11"
    assert check.find(18.1, 1.0, RECENT[: MIN_LOSSES - 1]) is None
    assert AnomalyCheck(TrainingConfig()).find(1e9, 1.0, RECENT) is None


@pytest.mark.parametrize("checks_nan", [True, False])
@pytest.mark.parametrize("checks_spikes", [True, False])
@pytest.mark.parametrize("recent", [RECENT, RECENT[: MIN_LOSSES - 1]])
def test_the_device_skips_the_updates_that_the_host_skips(checks_nan, checks_spikes, recent) -> None:
    config = TrainingConfig(
        check_for_nan_in_loss_and_grad=checks_nan,
        check_for_spiky_loss=checks_spikes,
        spiky_loss_factor=3.0,
    )
    check = AnomalyCheck(config)
    for loss in (-math.inf, -1.0, 0.0, 17.9, 18.0, math.nextafter(18.0, 19.0), 1e300, math.inf, math.nan):
        allowed = check.allows(torch.tensor(loss, dtype=torch.float64), recent)
        assert allowed.item() is (check.find(loss, 1.0, recent) is None), loss


def test_losses_to_keep() -> None:
    check = AnomalyCheck(SPIKES)
    assert check.losses_to_keep(2.0) == (2.0,)
    assert check.losses_to_keep(math.nan) == ()
    assert AnomalyCheck(TrainingConfig()).losses_to_keep(2.0) == ()
