"""Factors in the words of a layout."""

from __future__ import annotations

import pytest
import torch

from megalite.observe.judge.compare import factor_of, named_factor


@pytest.mark.parametrize(
    ("factor", "name"),
    [
        (2.0, "2 (tp) times"),
        (3.0**0.5, "1.73205 (sqrt(dp)) times"),
        (1 / 6, "0.166667 (1/(tp * dp)) times"),
        (1.5, "1.5 (dp/tp) times"),
        (-1.0, "-1 (-1) times"),
        (1.1, "1.1 times"),
        (0.0, "zero"),
    ],
)
def test_a_factor_is_named(factor: float, name: str) -> None:
    assert named_factor(factor, {"tp": 2, "dp": 3, "pp": 1}) == name


def test_a_factor_is_that_of_all_elements() -> None:
    reference = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    assert factor_of(reference * 2.0, reference, 1e-8) == pytest.approx(2.0)
    assert factor_of(reference * torch.tensor([2.0, 2.0, 2.1]), reference, 1e-8) is None
    assert factor_of(reference, torch.zeros(3), 1e-8) is None
