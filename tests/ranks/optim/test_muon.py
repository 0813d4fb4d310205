"""Muon over ranks: any layout updates the weights that one rank updates, and the ranks share the work."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from torch import Tensor

from megalite.config import Config, OptimizerConfig, ParallelConfig
from megalite.optim import muon
from megalite.optim.optimizer import Optimizer
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterSpec, gather_full, new_parameter
from megalite.tensor_parallel.placement import Cut
from tests.live_ranks import run_ranks

SPECS = {
    "word": ParameterSpec((16, 12), Cut("tp", 0), is_vocabulary=True),
    "qkv": ParameterSpec((32, 12), Cut("tp", 0), fused_rows=(8, 4, 4)),  # with tp 4 a rank has half a group
    "projection": ParameterSpec((12, 16), Cut("tp", 1)),
    "up": ParameterSpec((2, 20, 12), Cut("tp", 1)),
    "down": ParameterSpec((12, 20), Cut("tp", 1)),
    "router": ParameterSpec((4, 12)),
    "bias": ParameterSpec((12,), decay=False),
}
NUM_MATRICES = 8
OPTIMIZER = OptimizerConfig(optimizer="muon", muon_nesterov=True, clip_grad=0.5)
LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2},
    "tp4": {"tensor_model_parallel_size": 4},
    "dp2": {"data_parallel_size": 2},
    "dp2, zero 1": {"data_parallel_size": 2, "zero_stage": 1},
    "dp4, zero 2, shards 2": {
        "data_parallel_size": 4,
        "zero_stage": 2,
        "num_distributed_optimizer_instances": 2,
    },
    "tp2, dp2": {"tensor_model_parallel_size": 2, "data_parallel_size": 2},
    "tp2, dp2, zero 2": {"tensor_model_parallel_size": 2, "data_parallel_size": 2, "zero_stage": 2},
    "tp2, dp4, zero 1, shards 2": {
        "tensor_model_parallel_size": 2,
        "data_parallel_size": 4,
        "zero_stage": 1,
        "data_parallel_shard_degree": 2,
    },
}


def values_of(name: str, iteration: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * iteration + sum(map(ord, name)))
    return torch.randn(SPECS[name].full_shape, generator=generator, dtype=torch.float64)


def train(topology, parallel: ParallelConfig, bucket_size: int) -> tuple[dict[str, Tensor], int, bool]:
    """The full weights, this rank's number of orthogonalized matrices, and whether its moments are shards."""
    context = LayerContext(topology, torch.float64)
    parameters = {name: new_parameter(spec, context) for name, spec in SPECS.items()}
    for name, parameter in parameters.items():
        parameter.data.copy_(SPECS[name].box(topology).of(values_of(name, 0)))
    parallel = dataclasses.replace(parallel, ddp_bucket_size=bucket_size)
    optimizer = Optimizer(parameters.items(), None, OPTIMIZER, parallel, topology, torch.float64)
    count, plain = 0, muon.orthogonalize

    def counted(matrix: Tensor, *settings) -> Tensor:
        nonlocal count
        count += 1
        return plain(matrix, *settings)

    muon.orthogonalize = counted
    try:
        for iteration in (1, 2, 3):
            optimizer.begin(1)
            for name, parameter in parameters.items():
                gradient = SPECS[name].box(topology).of(values_of(name, iteration))
                share = (1 + topology.dp.rank) / sum(range(1, topology.dp.size + 1))
                (parameter * gradient * share).sum().backward()
            optimizer.step(0.02, 0.1, optimizer.finish_gradients())
            optimizer.finish_weights()
    finally:
        muon.orthogonalize = plain
    full = {name: gather_full(each, each.spec, topology) for name, each in parameters.items()}
    assert optimizer.muon is not None
    return full, count // 3, not optimizer.muon.states[0].is_replicated


def train_each(topology, parallel: ParallelConfig) -> list[tuple[dict[str, Tensor], int, bool]]:
    """With several exchanges, and with one."""
    return [train(topology, parallel, bucket_size) for bucket_size in (100, 10**6)]


@functools.cache
def on_one_rank() -> dict[str, Tensor]:
    parallel = ParallelConfig(distributed_backend="gloo")
    ((weights, count, _),) = run_ranks(train, Config(parallel=parallel).mesh, 1, parallel, 10**6)
    assert count == NUM_MATRICES
    return weights


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_updates_as_one_rank_does(name):
    parallel = ParallelConfig(**LAYOUTS[name], distributed_backend="gloo")
    mesh = Config(parallel=parallel, optimizer=OPTIMIZER).mesh
    several, one = zip(*run_ranks(train_each, mesh, mesh.smallest_world, parallel), strict=True)
    for weights, _, is_sharded in (*several, *one):
        assert is_sharded == ("zero" in name)
        for key, weight in on_one_rank().items():
            torch.testing.assert_close(weights[key], weight, rtol=1e-12, atol=1e-12)
    for counts in ([count for _, count, _ in results] for results in (several, one)):
        # Each tensor-parallel rank has the router, which tp does not cut.
        assert sum(counts) == NUM_MATRICES + parallel.tp - 1
    assert max(count for _, count, _ in one) < NUM_MATRICES
