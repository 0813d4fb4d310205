"""The counts and entropies of microbatches add up."""

from __future__ import annotations

import math

import pytest
import torch

from megalite.model.routing_record import RoutingStatistics


def test_microbatches_add_up() -> None:
    statistics = RoutingStatistics(4, torch.device("cpu"))
    # The probabilities of two tokens are 1/2, 1/2, 0, 0, those of the third 1/4 each; the fourth is padding.
    of_two = torch.tensor([[[0.5, 0.5, 0.0, 0.0]], [[0.5, 0.5, 0.0, 0.0]]])
    statistics.add(torch.tensor([2, 2, 0, 0]), of_two, None)
    real = torch.tensor([[True], [False]])
    statistics.add(torch.tensor([1, 0, 0, 1]), torch.full((2, 1, 4), 0.25), real)
    assert statistics.num_tokens.tolist() == [3, 2, 0, 1]
    assert statistics.entropy.item() == pytest.approx(2 * math.log(2) + math.log(4))
