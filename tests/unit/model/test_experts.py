"""Experts compute what each token's own MLPs do, whatever the router selects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from megalite.config import ModelConfig, RecomputeConfig
from megalite.config.presets import PRESETS
from megalite.data.microbatch import Microbatch, WithTerms
from megalite.model.expert_dispatch import Rows
from megalite.model.experts import BALANCE_LOSS, ROUTER_Z_LOSS, MixtureOfExperts, Router
from megalite.model.grouped_linear import grouped_linear
from megalite.model.mlp import MLP
from megalite.model.routing_record import RoutingStatistics
from megalite.optim.post_step_hooks import ExpertBalance
from megalite.tensor_parallel.counter_random import initialize
from megalite.tensor_parallel.parameter_spec import LayerContext, spec_of
from tests.stages import build_stage

CONFIG = replace(
    PRESETS["llama-tiny"],
    hidden_size=12,
    kv_channels=4,
    seq_length=9,
    vocab_size=101,
    params_dtype="fp64",
    init_method_std=0.4,
    num_experts=5,
    moe_router_topk=3,
    moe_ffn_hidden_size=7,
    moe_z_loss_coeff=0.1,
)
GATED = {"moe_shared_expert_intermediate_size": 11, "moe_shared_expert_gate": True}
EXACT = {"rtol": 1e-13, "atol": 1e-13}


def experts_of(config: ModelConfig, topology) -> MixtureOfExperts:
    context = LayerContext(topology, torch.float64)
    block = MixtureOfExperts(config, context, Router(config, context))
    initialize(block, 3, topology)
    return block


def hidden(num_samples: int = 2, length: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(length, num_samples, 12, generator=generator, dtype=torch.float64)


def token_by_token(block: MixtureOfExperts, x: Tensor) -> Tensor:
    """Compute each token's experts one after the other."""
    out = torch.zeros_like(x)
    for place in torch.cartesian_prod(*map(torch.arange, x.shape[:2])):
        token = x[tuple(place)]
        logits = block.router.weight @ token + (0 if block.router.bias is None else block.router.bias)
        best = logits.topk(block.router.topk)
        for weight, number in zip(best.values.softmax(0), best.indices, strict=True):
            gate, up = (half @ token for half in block.up.weight[number])
            if block.up.bias is not None:
                gate, up = gate + block.up.bias[number, 0], up + block.up.bias[number, 1]
            output = block.down.weight[number] @ (F.silu(gate) * up)
            out[tuple(place)] += weight * (
                output if block.down.bias is None else output + block.down.bias[number]
            )
    return out


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("topk", [1, 3, 5])
def test_a_token_gets_the_sum_of_its_experts(topk: int, bias: bool, one_rank) -> None:
    block = experts_of(replace(CONFIG, moe_router_topk=topk, add_mlp_bias=bias), one_rank)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for each in block.parameters():
            if each.dim() < 3 and each is not block.router.weight:
                each.normal_(generator=generator)
    ours, theirs = (hidden().requires_grad_() for _ in range(2))
    y = block(ours).x
    expected = token_by_token(block, theirs)
    torch.testing.assert_close(y, expected, **EXACT)
    weights = list(block.parameters())
    found = torch.autograd.grad(y.square().sum(), [ours, *weights])
    wanted = torch.autograd.grad(expected.square().sum(), [theirs, *weights], materialize_grads=True)
    torch.testing.assert_close(found, wanted, **EXACT)


@pytest.mark.parametrize("length", [1, 9])
def test_all_tokens_may_have_one_expert(length: int, one_rank) -> None:
    block = experts_of(replace(CONFIG, moe_router_topk=1), one_rank)
    with torch.no_grad():
        block.router.weight.zero_()  # of equal scores, the first counts
    x = hidden(1, length)
    y, _, terms, _ = block(x)
    (gate, up), down = block.up.weight[0], block.down.weight[0]
    torch.testing.assert_close(y, (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t(), **EXACT)
    y.sum().backward()
    assert not block.up.weight.grad[1:].any() and not block.down.weight.grad[1:].any()
    assert float(terms[BALANCE_LOSS].total) == pytest.approx(length)  # e times a share of 1 / e


@pytest.mark.parametrize("kind", ["seq_aux_loss", "aux_loss", "global_aux_loss"])
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_padding_counts_nowhere(kind: str, score_function: str, one_rank) -> None:
    """The terms, counts and gradients are those of each sample without its padding."""
    config = replace(
        CONFIG,
        moe_router_load_balancing_type=kind,
        moe_router_score_function=score_function,
        moe_router_enable_expert_bias=True,
    )
    router = experts_of(config, one_rank).router
    if router.expert_loads is not None:
        router.expert_loads.copy_(torch.tensor([0.1, 0.3, 0.2, 0.25, 0.15]))
    x, lengths = hidden(4), (9, 5, 1, 0)  # the last sample is padding only
    is_real = torch.arange(9)[:, None] < torch.tensor(lengths)

    def route(x: Tensor, is_real: Tensor | None) -> tuple[list[Tensor], Tensor, Tensor]:
        router.num_tokens.zero_()
        router.statistics = RoutingStatistics(5, torch.device("cpu"))
        terms = router(x, torch.arange(x.shape[1]), is_real).terms
        values = [terms[name].total for name in (BALANCE_LOSS, ROUTER_Z_LOSS)]
        counted, router.statistics = router.statistics, None
        assert torch.equal(counted.num_tokens, router.num_tokens)
        return values, counted.num_tokens, counted.entropy

    found, counts, entropy = route(x, is_real)
    samples = [x[:length, i : i + 1] for i, length in enumerate(lengths) if length]
    if kind == "aux_loss":  # one mean over the microbatch
        samples = [torch.cat(samples)]
    alone = [route(each, None) for each in samples]
    expected = [sum(values) for values in zip(*(each[0] for each in alone), strict=True)]
    torch.testing.assert_close(found, expected, **EXACT)
    assert torch.equal(counts, sum(each[1] for each in alone)) and counts.sum() == 3 * sum(lengths)
    torch.testing.assert_close(entropy, sum(each[2] for each in alone), **EXACT)
    gradients = [torch.autograd.grad(sum(each), router.weight) for each in (found, expected)]
    torch.testing.assert_close(*gradients, **EXACT)

    logits = (x[is_real] @ router.weight.t()).detach().numpy()  # and with numpy
    squares = np.log(np.exp(logits).sum(-1)) ** 2
    assert float(found[1]) == pytest.approx(squares.sum(), rel=1e-13)
    if kind == "aux_loss" and score_function == "softmax":
        mask = is_real.t().long()
        theirs = load_balancing_loss_func((x.transpose(0, 1).flatten(0, 1) @ router.weight.t(),), 5, 3, mask)
        # Theirs is a sum over the choices of a token instead of a mean.
        assert float(found[0]) == pytest.approx(float(theirs) / 3 * sum(lengths), rel=1e-6)  # in fp32


def test_padding_takes_no_capacity(one_rank) -> None:
    config = replace(CONFIG, moe_expert_capacity_factor=0.5)
    router = experts_of(config, one_rank).router
    x, is_real = hidden(2), torch.arange(9)[:, None] < torch.tensor([9, 4])
    router.statistics = RoutingStatistics(5, torch.device("cpu"))
    kept = router(x, torch.arange(2), is_real).experts
    dropped, router.statistics = router.statistics.num_dropped, None
    alone = router(x[:4, 1:], torch.arange(1)).experts
    assert torch.equal(kept[:4, 1:], alone) and (kept[4:, 1] == 5).all()
    assert dropped == (kept == 5).sum() - 5 * 3


@pytest.mark.parametrize("topk", [1, 3])
def test_scores_may_all_be_zero(topk: int, one_rank) -> None:
    """In fp32 a sigmoid is 0 below about -104, and its gradient below about -88."""
    config = replace(CONFIG, moe_router_score_function="sigmoid", moe_router_topk=topk, params_dtype="fp32")
    router = Router(config, LayerContext(one_rank, torch.float32))
    with torch.no_grad():
        router.weight.fill_(-20.0)
    x = torch.ones(2, 1, 12, requires_grad=True)
    router.statistics = RoutingStatistics(5, torch.device("cpu"))
    weights, _, terms = router(x)
    assert not weights.any() and router.statistics.entropy == 0
    total = weights.sum() + sum(term.total for term in terms.values())
    assert all(each.isfinite().all() for each in torch.autograd.grad(total, [x, router.weight]))


@pytest.mark.parametrize("num_summed", [1, 2, 3])  # a group has two
def test_experts_are_in_the_best_groups(num_summed: int, one_rank) -> None:
    fields = {"num_experts": 6, "moe_router_topk": 2, "moe_router_num_groups": 3, "moe_router_group_topk": 1}
    fields["moe_router_group_scores"] = num_summed
    block = experts_of(replace(CONFIG, **fields, moe_router_score_function="sigmoid"), one_rank)
    x = hidden()
    scores = (x @ block.router.weight.t()).sigmoid()
    by_group = scores.unflatten(-1, (3, 2))
    of_groups = by_group.amax(-1) if num_summed == 1 else by_group.sum(-1)
    best = of_groups.argmax(-1, keepdim=True)
    weights, experts, _ = block.router(x)
    assert torch.equal(experts.sort(-1).values, torch.cat((2 * best, 2 * best + 1), -1))
    torch.testing.assert_close(weights.sum(-1), torch.ones(x.shape[:2], dtype=torch.float64), **EXACT)
    other = experts_of(block.router.config, one_rank)
    other.router.config = replace(block.router.config, moe_router_topk_scaling_factor=2.5)
    torch.testing.assert_close(other.router(x).weights, 2.5 * weights, **EXACT)


def test_forced_routing_is_even_and_weighs_as_the_router_does(one_rank) -> None:
    fields = {"moe_router_force_load_balancing": True, "moe_router_pre_softmax": True}
    block = experts_of(replace(CONFIG, moe_router_enable_expert_bias=True, **fields), one_rank)
    x = hidden(2, 4096)
    weights, experts, _ = block.router(x, torch.arange(2))
    assert not block.router.num_tokens.any()  # the bias, which only evaluation uses, stays as it is
    counts = experts.flatten().bincount(minlength=5)
    assert counts.max() < 1.05 * counts.double().mean()
    assert torch.equal(experts[:, 0], experts[:, 1])
    assert (experts.sort(-1).values.diff(dim=-1) > 0).all()  # three different ones
    shares = (x @ block.router.weight.t()).softmax(-1)
    torch.testing.assert_close(weights, shares.gather(-1, experts), **EXACT)
    learned = experts_of(CONFIG, one_rank).router(x).experts
    assert torch.equal(block.eval().router(x).experts, learned) and not torch.equal(experts, learned)


def test_a_shared_expert_is_an_mlp_beside_the_others(one_rank) -> None:
    block = experts_of(replace(CONFIG, moe_shared_expert_intermediate_size=11), one_rank)
    x = hidden()
    y = block(x).x
    shared = block.shared
    block.shared = None
    torch.testing.assert_close(y - block(x).x, shared(x).x, rtol=1e-12, atol=1e-12)


def test_the_layer_adds_the_bias_of_a_shared_expert(one_rank) -> None:
    config = replace(CONFIG, moe_shared_expert_intermediate_size=11, add_bias_linear=True)
    block = experts_of(config, one_rank)
    assert block(hidden()).bias is block.shared.down.bias is not None


def test_a_gate_multiplies_the_shared_expert(one_rank) -> None:
    shared = experts_of(replace(CONFIG, **GATED), one_rank).shared
    x = hidden()
    gate = (x @ shared.gate.weight.squeeze(0)).sigmoid().unsqueeze(-1)
    torch.testing.assert_close(shared(x).x, gate * MLP.transform(shared, x), **EXACT)
    assert not spec_of(shared.gate.weight).is_matrix  # for Muon: one row has no orthogonal form


def test_rows_of_groups_without_rows() -> None:
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 2, 3, dtype=torch.float64, requires_grad=True)
    middle, ends = (torch.tensor(each, dtype=torch.int32) for each in ([0, 4, 4], [1, 1, 4]))
    assert torch.autograd.gradcheck(lambda x, w: grouped_linear(x, w, middle), (x, weight))
    torch.testing.assert_close(grouped_linear(x, weight, ends)[1:], x[1:] @ weight[2].t())


def test_rows_keep_the_order_of_tokens() -> None:
    rows = Rows.of(torch.tensor([[2, 0], [0, 1], [2, 1]]), 4)
    assert rows.order.tolist() == [1, 2, 3, 5, 0, 4] and rows.ends.tolist() == [2, 4, 6, 6]
    x = torch.arange(3.0).unsqueeze(1)
    assert rows.of_tokens(x).flatten().tolist() == [0, 1, 1, 2, 0, 2]
    assert rows.sums_of_tokens(rows.of_tokens(x)).flatten().tolist() == [0, 2, 4]


def test_balance_loss_is_that_of_transformers_for_one_sample(one_rank) -> None:
    block = experts_of(CONFIG, one_rank)
    x = hidden(1)
    terms = block(x).terms
    logits = (x @ block.router.weight.t()).flatten(0, 1)
    expected = load_balancing_loss_func((logits,), num_experts=5, top_k=3)  # its parts add up to topk
    assert float(terms[BALANCE_LOSS].total) == pytest.approx(float(expected) / 3 * 9, rel=1e-6)
    torch.testing.assert_close(terms[ROUTER_Z_LOSS].total, logits.logsumexp(-1).square().sum(), **EXACT)


def test_balance_loss_of_a_microbatch_is_that_of_transformers(one_rank) -> None:
    block = experts_of(replace(CONFIG, moe_router_load_balancing_type="aux_loss"), one_rank)
    x = hidden(3)
    logits = (x @ block.router.weight.t()).flatten(0, 1)
    expected = load_balancing_loss_func((logits,), num_experts=5, top_k=3) / 3 * len(logits)
    assert float(block(x).terms[BALANCE_LOSS].total) == pytest.approx(float(expected), rel=1e-6)


def test_balance_loss_by_global_loads_is_that_of_the_last_batch(one_rank) -> None:
    """With equal batches, it is the loss over a microbatch that is the whole batch."""
    config = replace(CONFIG, moe_router_load_balancing_type="global_aux_loss")
    block, x = experts_of(config, one_rank), hidden(3)
    balance = ExpertBalance(one_rank, [block.router], rate=0.0)

    def iteration() -> torch.Tensor:
        balance.begin()
        total = sum(block(x[:, i : i + 1]).terms[BALANCE_LOSS].total for i in range(3))
        balance.step(torch.tensor(True))
        return total

    num_tokens = len(x) * 3
    torch.testing.assert_close(iteration(), torch.tensor(float(num_tokens), dtype=x.dtype), **EXACT)
    of_microbatch = experts_of(replace(CONFIG, moe_router_load_balancing_type="aux_loss"), one_rank)
    torch.testing.assert_close(iteration(), of_microbatch(x).terms[BALANCE_LOSS].total, **EXACT)


def test_a_samples_balance_needs_no_other_sample(one_rank) -> None:
    block = experts_of(CONFIG, one_rank)
    x = hidden(3)
    alone = sum(block(x[:, i : i + 1]).terms[BALANCE_LOSS].total for i in range(3))
    torch.testing.assert_close(block(x).terms[BALANCE_LOSS].total, alone, **EXACT)


@pytest.mark.parametrize(
    "recompute",
    [
        RecomputeConfig(recompute_granularity="full"),
        RecomputeConfig(recompute_granularity="selective", recompute_modules=("mlp",)),
        RecomputeConfig(recompute_granularity="selective", recompute_modules=("layernorm", "core_attn")),
    ],
    ids=["full", "mlp", "layernorm"],
)
@pytest.mark.parametrize("changes", [{}, {"moe_beside_mlp": True, "norm_position": "sandwich"}])
def test_recomputation_routes_as_forward_did(
    recompute: RecomputeConfig, changes: dict[str, Any], one_rank
) -> None:
    tokens = torch.randint(101, (2, 9), generator=torch.Generator().manual_seed(5))
    config, found = replace(CONFIG, **(changes or GATED)), []
    for each in (None, recompute):
        stage = build_stage(config, one_rank, range(config.num_layers), seed=3, recompute=each)
        output = stage(Microbatch(tokens, tokens, torch.arange(2)), None)
        assert isinstance(output, WithTerms) and set(output.terms) == set(stage.loss_names)
        sum(term.value(18) for term in output.terms.values()).backward()
        found.append([parameter.grad for parameter in stage.parameters()])
    assert all(map(torch.equal, *found))


def test_experts_beside_an_mlp_are_recomputed_with_it(one_rank) -> None:
    config = replace(CONFIG, moe_beside_mlp=True, norm_position="sandwich", num_layers=1)
    recompute = RecomputeConfig(recompute_granularity="selective", recompute_modules=("mlp",))
    stage = build_stage(config, one_rank, range(1), seed=3, recompute=recompute)
    calls = []
    stage.layers["0"].experts.router.register_forward_hook(lambda *_: calls.append(1))
    tokens = torch.zeros(1, 9, dtype=torch.int64)
    output = stage(Microbatch(tokens, tokens, torch.arange(1)), None)
    sum(term.value(9) for term in output.terms.values()).backward()
    assert len(calls) == 2


def test_layers_without_experts_have_an_mlp(one_rank) -> None:
    config = replace(CONFIG, num_layers=4)
    kinds = {
        None: [1, 1, 1, 1],
        (3,): [1, 0, 0, 1],
        (0, 1, 1, 0): [0, 1, 1, 0],
    }
    for pattern, expected in kinds.items():
        stage = build_stage(replace(config, moe_layer_freq=pattern), one_rank, range(4), seed=3)
        found = [isinstance(layer.mlp, MixtureOfExperts) for layer in stage.layers.values()]
        assert found == [bool(each) for each in expected]
