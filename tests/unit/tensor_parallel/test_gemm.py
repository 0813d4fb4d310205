"""Weight gradients that are stored and computed later."""

from __future__ import annotations

import torch
from torch import nn

from megalite.tensor_parallel.gemm import WeightGradient, run_stored


def test_a_sum_that_a_product_adds_to_joins_no_graph() -> None:
    """The saved input has one: the sum would keep it, and could not be written to any more."""
    total, saved = torch.zeros(3), torch.ones(3, requires_grad=True) * 2.0

    def compute() -> None:
        total.add_(saved)

    run_stored([WeightGradient(nn.Parameter(torch.zeros(3)), compute)])
    assert not total.requires_grad
    assert total.tolist() == [2.0, 2.0, 2.0]


def test_a_gradient_that_comes_back_is_accumulated() -> None:
    weight = nn.Parameter(torch.zeros(3))
    run_stored(
        [WeightGradient(weight, lambda: torch.ones(3)), WeightGradient(weight, lambda: torch.full((3,), 2.0))]
    )
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0, 3.0, 3.0]
