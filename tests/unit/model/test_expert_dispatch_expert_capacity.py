"""Experts keep the choices with the highest priorities of each sample, up to their capacity."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalite.model.expert_dispatch import Rows, capacity_of, within_capacity
from megalite.model.experts import MixtureOfExperts
from megalite.model.routing_record import RoutingStatistics
from tests.unit.model.test_experts import CONFIG, EXACT, experts_of, hidden


@pytest.mark.parametrize(("factor", "expected"), [(1.0, 6), (1.01, 7), (0.01, 1), (9.0, 54)])
def test_the_capacity_is_a_multiple_of_the_mean(factor: float, expected: int) -> None:
    assert capacity_of(torch.tensor([30]), 5, factor).tolist() == [expected]


def by_hand(experts: Tensor, priorities: Tensor, capacity: int) -> Tensor:
    """Let each expert take choices one after the other."""
    kept = torch.zeros_like(experts, dtype=torch.bool)
    length, num_samples, topk = experts.shape
    for sample in range(num_samples):
        places = [(s, k) for s in range(length) for k in range(topk)]
        for expert in experts.unique().tolist():
            own = [place for place in places if experts[place[0], sample, place[1]] == expert]
            own.sort(key=lambda place: -float(priorities[place[0], sample, place[1]]))
            for s, k in own[:capacity]:
                kept[s, sample, k] = True
    return kept


@pytest.mark.parametrize(("factor", "capacity"), [(0.1, 1), (0.5, 3), (9.0, 51)])
@pytest.mark.parametrize("num_values", [1, 4, 1000])
def test_the_highest_priorities_have_a_place(factor: float, capacity: int, num_values: int) -> None:
    """With few values, many priorities are equal."""
    generator = torch.Generator().manual_seed(capacity)
    experts = torch.rand(17, 3, 6, generator=generator).argsort(-1)[..., :2]
    priorities = torch.randint(num_values, experts.shape, generator=generator).double()
    found = within_capacity(experts, priorities, 6, factor)
    assert torch.equal(found, by_hand(experts, priorities, capacity))
    # Padding takes no place, and gives the experts of its sample less capacity.
    experts[10:, 1] = 6
    found = within_capacity(experts, priorities, 6, factor)
    alone = within_capacity(experts[:10, 1:2], priorities[:10, 1:2], 6, factor)
    assert torch.equal(found[:10, 1:2], alone)


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_dropped_tokens_lack_their_experts_share(policy: str, one_rank) -> None:
    config = replace(CONFIG, moe_expert_capacity_factor=0.5, moe_token_drop_policy=policy)
    block = experts_of(config, one_rank)
    router = block.router
    router.statistics = RoutingStatistics(router.num_experts, torch.device("cpu"))
    x = hidden().requires_grad_()
    y = block(x, torch.arange(x.shape[1])).x
    counted, router.statistics = router.statistics, None

    weights, experts, _ = block.eval().router(x)
    priorities = weights.detach() if policy == "probs" else torch.zeros_like(weights)
    kept = by_hand(experts, priorities, math.ceil(9 * 3 * 0.5 / 5))
    assert counted.num_dropped == (~kept).sum() > 0 and counted.num_tokens.sum() == kept.numel()
    if policy == "position":
        assert (kept.sum(-1) == 0).any()  # a token without any expert
    whole = experts_of(CONFIG, one_rank)
    expected = torch.zeros_like(x)
    for number in range(5):
        share = (weights * kept * (experts == number)).sum(-1, keepdim=True)
        expected = expected + share * expert_output(whole, x, number)
    torch.testing.assert_close(y, expected, **EXACT)
    parameters = [x, *block.parameters()]
    (wanted,) = torch.autograd.grad(expected.square().sum(), [x], retain_graph=True)
    found = torch.autograd.grad(y.square().sum(), parameters)
    torch.testing.assert_close(found[0], wanted, **EXACT)
    assert all(each.isfinite().all() for each in found)


def expert_output(block: MixtureOfExperts, x: Tensor, number: int) -> Tensor:
    gate, up = (x @ half.t() for half in block.up.weight[number])
    return (torch.nn.functional.silu(gate) * up) @ block.down.weight[number].t()


def test_evaluation_drops_nothing(one_rank) -> None:
    config = replace(CONFIG, moe_expert_capacity_factor=0.1)
    y = experts_of(config, one_rank).eval()(hidden()).x
    torch.testing.assert_close(y, experts_of(CONFIG, one_rank)(hidden()).x, **EXACT)


def test_rows_that_are_all_dropped() -> None:
    rows = Rows.of(torch.full((4, 2), 3), 3, share=1.0)
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    assert rows.of_tokens(x).shape == (0, 5) and rows.ends.tolist() == [0, 0, 0]
    sums = rows.sums_of_tokens(rows.of_tokens(x))
    assert torch.equal(sums, torch.zeros(4, 5, dtype=torch.float64))
    sums.sum().backward()
    assert not x.grad.any()


def test_some_rows_are_dropped() -> None:
    rows = Rows.of(torch.tensor([[0, 2], [2, 2], [1, 0]]), 2, share=1.0)
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    y = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.equal(rows.of_tokens(x), x[[0, 2, 2]])
    assert torch.equal(rows.sums_of_tokens(y), torch.stack((y[0], 0 * y[0], y[2] + y[1])))
    assert torch.autograd.gradcheck(rows.of_tokens, (x,))
    assert torch.autograd.gradcheck(rows.sums_of_tokens, (y,))
