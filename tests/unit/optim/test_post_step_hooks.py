"""Biases and loads of experts follow the counts alone, and a bad update leaves them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megalite.model.experts import Router
from megalite.optim.post_step_hooks import ExpertBalance
from megalite.tensor_parallel.counter_random import initialize
from megalite.tensor_parallel.parameter_spec import LayerContext
from tests.unit.model.test_experts import CONFIG, hidden

BIASED = replace(CONFIG, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)


def router_of(topology) -> Router:
    router = Router(BIASED, LayerContext(topology, torch.float64))
    initialize(router, 3, topology)
    return router


@pytest.mark.parametrize("is_good", [True, False])
def test_the_bias_follows_the_counts(is_good: bool, one_rank) -> None:
    router = router_of(one_rank)
    balance = ExpertBalance(one_rank, [router], rate=0.25)
    router.num_tokens.fill_(7)
    balance.begin()
    assert not router.num_tokens.any()
    router.num_tokens.copy_(torch.tensor([3, 5, 4, 0, 8]))  # 4 in the mean
    balance.step(torch.tensor(is_good))
    expected = [0.25, -0.25, 0.0, 0.25, -0.25] if is_good else [0.0] * 5
    assert router.expert_bias.tolist() == expected


def test_every_choice_of_the_forward_is_counted(one_rank) -> None:
    router = router_of(one_rank)
    experts = [router(hidden()).experts for _ in range(2)]  # two microbatches
    with torch.no_grad():
        router(hidden())  # an evaluation
    assert router.num_tokens.tolist() == torch.cat(experts).flatten().bincount(minlength=5).tolist()


def test_the_bias_selects_but_does_not_weigh(one_rank) -> None:
    router = router_of(one_rank)
    router.expert_bias.copy_(torch.tensor([0.0, 9.0, 0.0, 8.0, 7.0]))
    weights, experts, _ = router(hidden())
    assert (experts == torch.tensor([1, 3, 4])).all()
    scores = (hidden() @ router.weight.t()).sigmoid()[..., [1, 3, 4]]
    torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True))


def test_equal_use_keeps_the_bias(one_rank) -> None:
    router = router_of(one_rank)
    router.num_tokens.fill_(3)
    ExpertBalance(one_rank, [router], rate=0.25).step(torch.tensor(True))
    assert not router.expert_bias.any()


@pytest.mark.parametrize("is_good", [True, False])
def test_the_loads_are_those_of_the_counts(is_good: bool, one_rank) -> None:
    config = replace(CONFIG, moe_router_load_balancing_type="global_aux_loss")
    router = Router(config, LayerContext(one_rank, torch.float64))
    router.num_counted.copy_(torch.tensor([3, 5, 4, 0, 8]))
    balance = ExpertBalance(one_rank, [router], rate=0.25)
    balance.step(torch.tensor(is_good))
    expected = [0.15, 0.25, 0.2, 0.0, 0.4] if is_good else [0.2] * 5
    assert router.expert_loads.tolist() == expected
    balance.begin()
    balance.step(torch.tensor(True))  # forced balance counts nothing
    assert router.expert_loads.tolist() == expected
