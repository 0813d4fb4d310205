"""The optimizer over ranks: each parameter once in the norm, tied copies equal, replicas equal."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from megalite.config import OptimizerConfig, ParallelConfig
from megalite.optim.optimizer import Optimizer
from megalite.tensor_parallel.parameter_spec import (
    LayerContext,
    ParameterSpec,
    new_parameter,
)
from megalite.tensor_parallel.placement import Cut
from megalite.tensor_parallel.vocab_parallel import TiedWeight, sum_tied_embedding_grads
from tests.live_ranks import run_ranks

SPECS = {
    "word": ParameterSpec((8, 4), Cut("tp", 0)),
    "inner.up": ParameterSpec((2, 8, 4), Cut("tp", 1)),
    "inner.down": ParameterSpec((4, 8), Cut("tp", 1)),
    "inner.bias": ParameterSpec((4,), decay=False),
    "norm": ParameterSpec((4,), decay=False),
}
STAGES = {1: [list(SPECS)], 2: [["word", "inner.up"], ["word", "inner.down", "inner.bias", "norm"]]}
STAGES[4] = [["word"], ["inner.up", "norm"], ["inner.bias"], ["inner.down", "word"]]
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 1)]
CONFIG = OptimizerConfig(lr=0.1, clip_grad=0.5)


def parallel(tp: int = 1, pp: int = 1, dp: int = 1) -> ParallelConfig:
    return ParallelConfig(tp, pp, dp, distributed_backend="gloo")


def full(name: str, what: int) -> torch.Tensor:
    """Numbers of a parameter's full shape."""
    generator = torch.Generator().manual_seed(1000 * what + sum(map(ord, name)))
    return torch.randn(SPECS[name].full_shape, generator=generator, dtype=torch.float64)


def mine(tensor: torch.Tensor, name: str, topology) -> torch.Tensor:
    """This rank's slice of a full tensor."""
    return SPECS[name].box(topology).of(tensor)


def build(topology) -> tuple[dict[str, nn.Parameter], Optimizer]:
    """This stage's parameters, and their optimizer."""
    context = LayerContext(topology, torch.float64)
    names = STAGES[topology.pp.size][topology.pp.rank]
    parameters = {name: new_parameter(SPECS[name], context) for name in names}
    for name, parameter in parameters.items():
        parameter.data.copy_(mine(full(name, 0), name, topology))
    at_edge = topology.pp.size > 1 and "word" in parameters
    tied = TiedWeight(parameters["word"], has_other_copy=True) if at_edge else None
    config = dataclasses.replace(parallel(), ddp_bucket_size=10)
    optimizer = Optimizer(parameters.items(), tied, CONFIG, config, topology, torch.float64)
    return parameters, optimizer


def run_step(topology) -> tuple[float, dict[str, torch.Tensor]]:
    """The norm and the new weights. Of a tied gradient, each of the two stages has a part."""
    parameters, optimizer = build(topology)
    optimizer.begin(1)
    for name, parameter in parameters.items():
        gradient = mine(full(name, 1), name, topology)
        is_part = name == "word" and topology.pp.size > 1
        share = (0.25 if topology.pp.is_first else 0.75) if is_part else 1.0
        (parameter * (gradient * share)).sum().backward()
    norm = optimizer.finish_gradients()
    optimizer.step(0.1, CONFIG.weight_decay, norm)
    return norm.item(), {name: parameter.detach().clone() for name, parameter in parameters.items()}


def expected_step() -> tuple[float, dict[str, torch.Tensor]]:
    """The same with torch's own parts on full tensors."""
    parameters = {name: nn.Parameter(full(name, 0)) for name in SPECS}
    for name, parameter in parameters.items():
        parameter.grad = full(name, 1)
    norm = nn.utils.clip_grad_norm_(parameters.values(), CONFIG.clip_grad).item()
    groups = [
        {
            "params": [parameters[name] for name in SPECS if SPECS[name].decay is decay],
            "weight_decay": CONFIG.weight_decay if decay else 0.0,
        }
        for decay in (True, False)
    ]
    torch.optim.AdamW(groups, lr=0.1, betas=(CONFIG.adam_beta1, CONFIG.adam_beta2)).step()
    return norm, {name: parameter.detach() for name, parameter in parameters.items()}


@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
def test_one_step_is_that_of_one_rank_by_torch(tp, pp):
    norm, weights = expected_step()
    for rank, (rank_norm, rank_weights) in enumerate(run_ranks(run_step, parallel(tp, pp).mesh, tp * pp)):
        assert rank_norm == pytest.approx(norm, rel=1e-14)
        for name, weight in rank_weights.items():
            dim = SPECS[name].dim_cut_over("tp")
            slices = weights[name].chunk(tp, dim) if dim is not None else [weights[name]] * tp
            torch.testing.assert_close(weight, slices[rank % tp], rtol=1e-13, atol=1e-15)


def sum_copies(topology) -> torch.Tensor | None:
    """Gradients of random numbers of all magnitudes, of the two copies of a tied weight."""
    if not (topology.pp.is_first or topology.pp.is_last):
        return None
    generator = torch.Generator().manual_seed(topology.rank)
    gradient = torch.randn((8, 4), generator=generator, dtype=torch.float64).exp()
    sum_tied_embedding_grads(gradient, topology.pp)
    return gradient


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 2), (1, 4)])
def test_tied_gradients_become_bitwise_equal(tp, pp):
    sums = run_ranks(sum_copies, parallel(tp, pp).mesh, tp * pp)
    for rank in range(tp):
        first, last = sums[rank], sums[tp * (pp - 1) + rank]
        parts = [
            torch.randn(
                first.shape, generator=torch.Generator().manual_seed(source), dtype=torch.float64
            ).exp()
            for source in (rank, tp * (pp - 1) + rank)
        ]
        assert torch.equal(first, last)
        assert torch.equal(first, parts[0] + parts[1])
    assert all(tensor is None for tensor in sums[tp : tp * (pp - 1)])


def run_replica(topology) -> tuple[float, list[torch.Tensor]]:
    """Two steps of replicas whose gradients differ."""
    parameters, optimizer = build(topology)
    norm = 0.0
    for step in range(2):
        optimizer.begin(1)
        for name, parameter in parameters.items():
            share = full(name, 2 + step) * (0.25 if topology.dp.is_first else 0.75)
            (parameter * mine(share, name, topology)).sum().backward()
        gradient_norm = optimizer.finish_gradients()
        optimizer.step(0.1, CONFIG.weight_decay, gradient_norm)
        norm = gradient_norm.item()
    return norm, [parameter.detach().clone() for parameter in parameters.values()]


def test_replicas_stay_bitwise_equal_and_sum_their_gradients():
    (norm, weights), (other_norm, other_weights) = run_ranks(run_replica, parallel(dp=2).mesh, 2)
    assert norm == other_norm
    expected = torch.cat([full(name, 3).flatten() for name in SPECS]).norm().item()
    assert norm == pytest.approx(expected, rel=1e-14)
    assert all(torch.equal(*pair) for pair in zip(weights, other_weights, strict=True))


def meet_infinity_on_one_rank(topology) -> bool:
    """One rank's shard of one gradient is infinite: every rank must skip the update."""
    parameters, optimizer = build(topology)
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    optimizer.begin(1)
    scales = [1.0] * len(parameters)
    if topology.rank == topology.world_size - 1:
        scales[0] = float("inf")
    for scale, parameter in zip(scales, parameters.values(), strict=True):
        (scale * parameter).sum().backward()
    optimizer.step(0.1, CONFIG.weight_decay, optimizer.finish_gradients())
    return all(torch.equal(parameters[name], before[name]) for name in before)


@pytest.mark.parametrize(("tp", "pp", "dp"), [(2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_an_infinite_gradient_on_one_rank_skips_the_update_on_all(tp, pp, dp):
    assert run_ranks(meet_infinity_on_one_rank, parallel(tp, pp, dp).mesh, 2) == [True] * 2


def use_one_copy_of_the_tied_weight(topology) -> torch.Tensor:
    """The tied gradient of a second iteration, in which the last stage alone uses the weight."""
    parameters, optimizer = build(topology)
    for is_used in (True, topology.pp.is_last):
        optimizer.begin(1)
        if is_used:
            parameters["word"].sum().backward()
        optimizer.finish_gradients()
    return optimizer.gradient("word")


def test_a_tied_copy_without_a_gradient_adds_zeros():
    for gradient in run_ranks(use_one_copy_of_the_tied_weight, parallel(1, 2).mesh, 2):
        assert torch.equal(gradient, torch.ones(8, 4, dtype=torch.float64))
