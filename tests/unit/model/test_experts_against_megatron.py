"""The terms, choices and counts of a router with padding, and the update of its biases, are megatron-core's.

It divides the counts of all samples by their mean length. Its function computes our seq_aux_loss sample by
sample.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.distributed.topology import Topology
from megalite.model.experts import BALANCE_LOSS, ROUTER_Z_LOSS, Router
from megalite.model.routing_record import RoutingStatistics
from megalite.optim.post_step_hooks import ExpertBalance
from tests.unit.model.test_experts import CONFIG, experts_of, hidden

moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils")

EXPERTS, TOPK, LENGTHS, RATE = 6, 4, (9, 5, 1, 3), 2**-6
SIGMOID = {"moe_router_score_function": "sigmoid"}
BIAS = {"moe_router_enable_expert_bias": True}
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax before the selection": {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
    "sigmoid": SIGMOID,
    "sigmoid with biases": SIGMOID | BIAS,
    "sigmoid in groups": SIGMOID | BIAS | {"moe_router_num_groups": 3, "moe_router_group_topk": 2},
}


def _router(topology: Topology, **options: Any) -> Router:
    fields = {"num_experts": EXPERTS, "moe_router_topk": TOPK, "moe_aux_loss_coeff": 1.0, **options}
    router = experts_of(replace(CONFIG, **fields), topology).router
    if router.expert_bias is not None:
        router.expert_bias.copy_(torch.linspace(-0.1, 0.1, EXPERTS))
    return router


def _their_selection(router: Router, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights of experts and whether they are selected, both ``[n, e]``."""
    config = router.config
    weights, selected = moe_utils.topk_routing_with_score_function(
        logits,
        TOPK,
        use_pre_softmax=config.moe_router_pre_softmax,
        num_groups=config.moe_router_num_groups,
        group_topk=config.moe_router_group_topk,
        scaling_factor=config.moe_router_topk_scaling_factor,
        score_function=config.moe_router_score_function,
        expert_bias=router.expert_bias,
    )
    return weights, selected


def _their_balance(router: Router, logits: Tensor, is_padding: Tensor) -> Tensor:
    """Return the balance loss of tokens, summed over those that are not padding.

    Args:
        logits: ``[n, e]``.
        is_padding: bool ``[n]``.
    """
    score_function = router.config.moe_router_score_function
    counted, scores = moe_utils.compute_routing_scores_for_aux_loss(
        logits, TOPK, score_function, padding_mask=is_padding
    )
    num_tokens = int((~is_padding).sum())
    loss = moe_utils.switch_load_balancing_loss_func(scores, counted.sum(0), num_tokens, TOPK, EXPERTS, 1.0)
    total: Tensor = loss * num_tokens
    return total


@pytest.mark.parametrize("kind", ["seq_aux_loss", "aux_loss", "global_aux_loss"])
@pytest.mark.parametrize("case", ROUTERS)
def test_a_router_with_padding_is_megatrons(
    case: str, kind: str, one_rank: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = _router(one_rank, moe_router_load_balancing_type=kind, **ROUTERS[case])
    x, is_real = hidden(len(LENGTHS)), torch.arange(9)[:, None] < torch.tensor(LENGTHS)
    logits, is_padding = (x @ router.weight.t()).flatten(0, 1), ~is_real.flatten()
    weights, selected = _their_selection(router, logits)
    counts = (selected & is_real.flatten()[:, None]).sum(0)
    if router.expert_loads is not None:  # those of an iteration before, which had the same tokens
        router(x, None, is_real)
        ExpertBalance(one_rank, [router], 0.0).step(torch.tensor(True))
        router.num_tokens.zero_()
    router.statistics = RoutingStatistics(EXPERTS, torch.device("cpu"))
    found = router(x, None, is_real)
    assert torch.equal(router.statistics.num_tokens, counts) and counts.unique().numel() > 2
    ours = torch.zeros_like(weights).scatter(1, found.experts.flatten(0, 1), found.weights.flatten(0, 1))
    torch.testing.assert_close(ours, weights, rtol=1e-6, atol=0.0)  # theirs are in fp32
    assert torch.equal(ours > 0, selected)

    of_samples = zip(logits.unflatten(0, x.shape[:2]).unbind(1), (~is_real).unbind(1), strict=True)
    batches = of_samples if kind == "seq_aux_loss" else [(logits, is_padding)]
    expected = sum(_their_balance(router, *each) for each in batches)
    tolerance = 1e-6 if "softmax" in case else 1e-13
    _same_with_gradient(found.terms[BALANCE_LOSS].total, expected, router, tolerance)
    z_loss = moe_utils.z_loss_func(logits, 1.0, padding_mask=is_padding) * sum(LENGTHS)
    _same_with_gradient(found.terms[ROUTER_Z_LOSS].total, z_loss, router, 1e-13)

    if router.expert_bias is not None:
        monkeypatch.setattr(moe_utils.parallel_state, "get_tensor_and_data_parallel_group", lambda **_: None)
        before = router.expert_bias.clone()
        ExpertBalance(one_rank, [router], RATE).step(torch.tensor(True))
        updated = moe_utils.get_updated_expert_bias(counts.float(), before, RATE)
        assert torch.equal(router.expert_bias, updated) and not torch.equal(updated, before)


def _same_with_gradient(ours: Tensor, theirs: Tensor, router: Router, tolerance: float) -> None:
    torch.testing.assert_close(ours, theirs.double(), rtol=tolerance, atol=0.0)
    found, wanted = (
        torch.autograd.grad(each, router.weight, retain_graph=True)[0] for each in (ours, theirs)
    )
    assert (found - wanted).abs().max() <= 10 * tolerance * wanted.abs().max()
