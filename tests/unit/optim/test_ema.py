"""The average of weights: a mean over all updates, which a skipped update leaves as it is."""

from __future__ import annotations

import pytest
import torch

from megalite.optim.ema import ema_share, swap_, update_ema_


@pytest.mark.parametrize("decay", [0.2, 0.9, 0.9999])
def test_the_average_is_a_weighted_mean_of_all_weights_but_the_initial_ones(decay: float) -> None:
    weights = torch.randn(20, 7, dtype=torch.float64)
    ema = torch.full((7,), 1e3, dtype=torch.float64)
    for number, weight in enumerate(weights, start=1):
        update_ema_(ema, weight, ema_share(torch.tensor(float(number)), decay))
        ages = torch.arange(number, dtype=torch.float64).flip(0)
        shares = decay**ages / (decay**ages).sum()
        assert torch.allclose(ema, shares @ weights[:number], rtol=1e-11, atol=1e-11)


def test_after_many_updates_it_is_the_usual_formula() -> None:
    assert ema_share(torch.tensor(10_000.0), 0.99).item() == pytest.approx(1 - 0.99, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_skipped_update_changes_no_bit(dtype: torch.dtype) -> None:
    ema, weight = torch.randn(2, 1001, dtype=dtype)
    before = ema.clone()
    update_ema_(ema, weight, ema_share(torch.tensor(0.0), 0.9) * torch.tensor(False))
    assert ema.equal(before)


@pytest.mark.parametrize("numel", [0, 1, 4_194_304 + 3])
def test_swapped_twice_all_bits_are_back(numel: int) -> None:
    one, other = torch.randn(numel), torch.randn(numel)
    first, second = one.clone(), other.clone()
    swap_(one, other)
    assert one.equal(second)
    assert other.equal(first)
    swap_(one, other)
    assert one.equal(first)
    assert other.equal(second)
