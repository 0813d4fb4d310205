"""Jitter depends on sample, position and feature, and on nothing else."""

from __future__ import annotations

import itertools

import pytest
import torch

from megalite.config import ParallelConfig
from megalite.data.microbatch import AssignedSamples
from megalite.distributed.topology import Topology
from megalite.tensor_parallel import counter_random
from megalite.tensor_parallel.counter_random import Jitter
from megalite.tensor_parallel.parameter_spec import LayerContext

SAMPLES = torch.tensor([3, 2**40])


def jitter_of(topology: Topology, eps: float = 0.25) -> Jitter:
    context = LayerContext(topology, torch.float64, seed=7, sequence_parallel=topology.tp.size > 1)
    return Jitter(eps, context, "layers.1.mlp.router.input")


def test_factors_are_uniform_around_one(one_rank: Topology) -> None:
    factors = jitter_of(one_rank)(torch.ones(64, 2, 128, dtype=torch.float64), SAMPLES)
    assert 0.75 < factors.min() < 0.751 and 1.249 < factors.max() < 1.25
    assert factors.mean().item() == pytest.approx(1.0, abs=0.01)
    assert factors.std().item() == pytest.approx(0.5 / 12**0.5, rel=0.02)
    assert len(factors.unique()) > 16000  # other samples, positions and features have others


def test_a_slice_has_the_factors_of_its_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(12, 2, 6, dtype=torch.float64)
    with Topology.fake(ParallelConfig().mesh, 1, rank=0) as topology:
        whole = jitter_of(topology)(x, SAMPLES)
        assert torch.equal(jitter_of(topology)(x[:, 1:], SAMPLES[1:]), whole[:, 1:])
    monkeypatch.setattr(counter_random, "_PIECE", 24)  # two positions at a time
    for rank in range(3):
        with Topology.fake(ParallelConfig(tensor_model_parallel_size=3).mesh, 3, rank=rank) as topology:
            own = slice(4 * rank, 4 * rank + 4)
            assert torch.equal(jitter_of(topology)(x[own], SAMPLES), whole[own])


def test_tokens_of_assigned_documents_have_the_factors_of_their_positions(one_rank: Topology) -> None:
    x = torch.randn(12, 2, 6, dtype=torch.float64)
    whole, runs = jitter_of(one_rank)(x, SAMPLES), ((range(2, 5), range(9, 10)), (range(4), range(0)))
    own = torch.tensor([[*itertools.chain(*each)] for each in runs]).t()  # [s, b]
    found = jitter_of(one_rank)(x[own, torch.arange(2)], AssignedSamples(SAMPLES, runs))
    assert torch.equal(found, whole[own, torch.arange(2)])


def test_evaluation_has_no_jitter(one_rank: Topology) -> None:
    x = torch.randn(3, 2, 4)
    assert jitter_of(one_rank).eval()(x, SAMPLES) is x


def test_the_gradient_has_the_factors_too(one_rank: Topology) -> None:
    x = torch.ones(3, 2, 4, dtype=torch.float64, requires_grad=True)
    y = jitter_of(one_rank)(x, SAMPLES)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
