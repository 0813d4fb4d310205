"""What data-parallel ranks share out: the same training, and the memory and traffic of the formulas."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megalite.config import OptimizerConfig, ParallelConfig
from megalite.distributed import collectives
from megalite.optim.flat_buffers import ALIGNMENT
from megalite.optim.optimizer import Optimizer
from megalite.optim.weight_gathering import ChunkModules
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterSpec, new_parameter
from tests.live_ranks import run_ranks

CONFIG = OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.5)
NUM_LAYERS = 3
NUM_MICROBATCHES = 3
NUM_ITERATIONS = 4
SHARED = {
    "zero1": {"zero_stage": 1},
    "zero1, reduced after backward": {"zero_stage": 1, "overlap_grad_reduce": False},
    "zero1, gathered under forward": {"zero_stage": 1, "overlap_param_gather": True},
    "reduced after backward": {"overlap_grad_reduce": False},
}


def parallel(dp: int, **changes) -> ParallelConfig:
    return ParallelConfig(data_parallel_size=dp, distributed_backend="gloo", ddp_bucket_size=1000, **changes)


class Layer(nn.Module):
    def __init__(self, topology, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        context = LayerContext(topology, dtype)
        self.weight = new_parameter(ParameterSpec((width, width)), context)
        self.bias = new_parameter(ParameterSpec((width,), decay=False), context)

    def forward(self, x):
        return torch.tanh(F.linear(x, self.weight, self.bias))


class Net(nn.Module):
    """Layers of odd sizes, with random weights."""

    def __init__(self, topology, dtype: torch.dtype, width: int = 23) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(topology, width, dtype) for _ in range(NUM_LAYERS)])
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)

    def forward(self, seed: int):
        weight = self.layers[0].weight
        x = torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(seed)).to(weight.dtype)
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def optimizer_of(net: Net, topology, config: ParallelConfig, adam: OptimizerConfig = CONFIG) -> Optimizer:
    dtype = net.layers[0].weight.dtype
    chunks = [ChunkModules(net, [], [(layer, list(layer.parameters())) for layer in net.layers])]
    return Optimizer(net.named_parameters(), None, adam, config, topology, dtype, chunks)


def iterate(net: Net, optimizer: Optimizer, rank: int, iteration: int) -> float:
    optimizer.begin(NUM_MICROBATCHES)
    for number in range(NUM_MICROBATCHES):
        net(1000 * iteration + 10 * rank + number).backward()
    norm = optimizer.finish_gradients()
    optimizer.step(1e-2, CONFIG.weight_decay, norm)
    return norm.item()


Training = tuple[list[float], list[torch.Tensor]]
"""Norms, weights, and the last gradients after a few clipped iterations."""


def train_each(topology, configs: list[ParallelConfig], dtype: torch.dtype) -> list[Training]:
    return [train(topology, config, dtype) for config in configs]


def train(topology, config: ParallelConfig, dtype: torch.dtype) -> Training:
    net = Net(topology, dtype)
    optimizer = optimizer_of(net, topology, config)
    norms = [iterate(net, optimizer, topology.dp.rank, i) for i in range(NUM_ITERATIONS)]
    optimizer.finish_weights()
    tensors = [parameter.detach().clone() for parameter in net.parameters()]
    return norms, tensors + [optimizer.gradient(name).clone() for name, _ in net.named_parameters()]


@pytest.mark.parametrize(
    ("dp", "dtype"), [(2, torch.float32), (2, torch.bfloat16), (4, torch.bfloat16)], ids=str
)
def test_sharing_out_the_state_changes_no_bit(dp, dtype):
    configs = [parallel(dp), *(parallel(dp, **changes) for changes in SHARED.values())]
    for (norms, tensors), *ways in run_ranks(train_each, parallel(dp).mesh, dp, configs, dtype):
        assert min(norms) > 0.0
        for way, (other_norms, others) in zip(SHARED, ways, strict=True):
            assert norms == other_norms, way
            assert all(torch.equal(*pair) for pair in zip(tensors, others, strict=True)), way


def test_groups_differ_by_rounding_alone():
    """Four replicas shard within two groups of two; each parameter, norm and gradient is that of dp."""
    norms, tensors = run_ranks(train, parallel(4).mesh, 4, parallel(4), torch.float64)[0]
    configs = [
        parallel(
            *(4,),
            zero_stage=stage,
            data_parallel_shard_degree=2,
            overlap_param_gather=overlap,
            overlap_grad_reduce=overlap,
        )
        for stage in (1, 2)
        for overlap in (True, False)
    ]
    for ranks in zip(*run_ranks(train_each, configs[0].mesh, 4, configs, torch.float64), strict=True):
        for other_norms, others in ranks:
            assert other_norms == pytest.approx(norms, rel=1e-13)
            assert all(torch.equal(*pair) for pair in zip(others, ranks[0][1], strict=True))  # replicas
            for tensor, other in zip(tensors, others, strict=True):
                torch.testing.assert_close(other, tensor, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("shard", "same_as"), [(4, None), (1, {"zero_stage": 0})])
def test_one_group_is_bitwise_zero_and_groups_of_one_rank_are_bitwise_none(shard, same_as):
    config = parallel(4, zero_stage=2, data_parallel_shard_degree=shard)
    same = parallel(4, **(same_as or {"zero_stage": 2}))
    norms, tensors = run_ranks(train, same.mesh, 4, same, torch.float32)[0]
    for other_norms, others in run_ranks(train, config.mesh, 4, config, torch.float32):
        assert other_norms == norms
        assert all(torch.equal(*pair) for pair in zip(tensors, others, strict=True))


def test_stage_2_differs_by_rounding_alone():
    overlapped, plain = (
        parallel(2, zero_stage=2, overlap_param_gather=overlap, overlap_grad_reduce=overlap)
        for overlap in (True, False)
    )
    configs = [parallel(2), overlapped, plain]
    for (norms, tensors), *ways in run_ranks(train_each, parallel(2).mesh, 2, configs, torch.float64):
        for other_norms, others in ways:
            assert other_norms == pytest.approx(norms, rel=1e-13)
            for tensor, other in zip(tensors, others, strict=True):
                torch.testing.assert_close(other, tensor, rtol=1e-9, atol=1e-12)


def memory(topology, config: ParallelConfig, dtype: torch.dtype) -> tuple[int, int, int]:
    """Bytes of all tensors that stay between iterations, parameters, and elements of padding."""
    net = Net(topology, dtype, width=200)
    optimizer = optimizer_of(net, topology, dataclasses.replace(config, ddp_bucket_size=40000))
    iterate(net, optimizer, topology.dp.rank, 0)
    kept = [each.bucket.weight for each in optimizer.buffers]
    kept += [each.shard_sum if hasattr(each, "shard_sum") else each.full for each in optimizer.buffers]
    kept += [tensor for state in optimizer.states for _, tensor in state.tensors()]
    assert all(parameter.grad is None for parameter in net.parameters())
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    num_parameters = sum(parameter.numel() for parameter in net.parameters())
    padding = sum(each.bucket.size for each in optimizer.buffers) - num_parameters
    return sum(storages.values()), num_parameters, padding


@pytest.mark.parametrize(
    ("dtype", "dp", "shard", "stage", "bytes_per_parameter"),
    [
        (torch.bfloat16, 1, None, 0, 18.0),
        (torch.bfloat16, 2, None, 0, 18.0),
        (torch.bfloat16, 2, None, 1, 6 + 12 / 2),
        (torch.bfloat16, 4, None, 1, 6 + 12 / 4),
        (torch.bfloat16, 4, 2, 1, 6 + 12 / 2),
        (torch.bfloat16, 4, None, 2, 2 + 16 / 4),
        (torch.bfloat16, 4, 2, 2, 2 + 16 / 2),
        (torch.bfloat16, 2, 1, 2, 18.0),
        (torch.float32, 2, None, 0, 16.0),
        (torch.float32, 4, None, 1, 8 + 8 / 4),
    ],
)
def test_memory_is_what_the_formula_says(dtype, dp, shard, stage, bytes_per_parameter):
    """Weights, gradients, main weights, moments (Rajbhandari et al. 2020, section 3), read from tensors."""
    config = parallel(dp, zero_stage=stage, data_parallel_shard_degree=shard)
    for total, num, padding in run_ranks(memory, config.mesh, dp, config, dtype):
        assert total == pytest.approx(bytes_per_parameter * (num + padding), rel=1e-12)
        assert padding < 0.01 * num + dp * ALIGNMENT * 2 * NUM_LAYERS


def traffic(topology, config: ParallelConfig) -> tuple[list[tuple[str, int]], int, int]:
    """The collectives of an iteration with their elements, the elements of all buckets, and their number."""
    calls: list[tuple[str, int]] = []

    def counted(module, name: str, tensor: int):
        collective = getattr(module, name)

        def call(*args, **options):
            calls.append((name.removesuffix("_single"), args[tensor].numel()))
            return collective(*args, **options)

        return mock.patch.object(module, name, call)

    net = Net(topology, torch.float32)
    optimizer = optimizer_of(net, topology, config)
    with (
        counted(dist, "all_reduce", 0),
        counted(collectives, "reduce_scatter_single", 1),
        counted(collectives, "all_gather_single", 0),
    ):
        iterate(net, optimizer, topology.dp.rank, 0)
        optimizer.finish_weights()
    return calls, sum(each.bucket.size for each in optimizer.buffers), len(optimizer.buffers)


@pytest.mark.parametrize("dp", [2, 4])
def test_traffic_is_what_the_formula_says(dp):
    """An all-reduce of n elements moves 2 n (d - 1) / d a rank, the other two n (d - 1) / d each."""
    share = {"all_reduce": 2 * (dp - 1) / dp, "reduce_scatter": (dp - 1) / dp, "all_gather": (dp - 1) / dp}
    for stage, num_rounds in ((0, 1), (1, 1), (2, NUM_MICROBATCHES)):
        config = parallel(dp, zero_stage=stage, overlap_param_gather=stage > 0)
        for calls, num_elements, num_buckets in run_ranks(traffic, parallel(dp).mesh, dp, config):
            assert calls.count(("all_reduce", 1)) == 1  # the norm
            calls.remove(("all_reduce", 1))
            assert len(calls) == num_buckets * (num_rounds + (stage > 0))
            moved = sum(share[name] * size for name, size in calls)
            assert moved == pytest.approx((num_rounds + 1) * num_elements * (dp - 1) / dp, rel=1e-12)


def wait_in_units(topology, one_ahead: bool) -> list[tuple[int, int]]:
    """Buckets on their way as forward comes to each layer, before and after it has waited."""
    net = Net(topology, torch.float32)
    seen: list[int] = []
    for layer in net.layers:
        layer.register_forward_pre_hook(lambda *_: seen.append(len(optimizer.gatherer._in_flight)))
    optimizer = optimizer_of(net, topology, parallel(2, zero_stage=1, overlap_param_gather=True))
    optimizer.gatherer.one_ahead = one_ahead
    for layer in net.layers:
        layer.register_forward_pre_hook(lambda *_: seen.append(len(optimizer.gatherer._in_flight)))
    net(0)
    assert seen == [0] * 6  # weights are complete before the first update
    iterate(net, optimizer, topology.dp.rank, 0)
    seen.clear()
    net(0)
    first_use = [[entry.name for entry in bucket.entries][-1] for bucket in optimizer.gatherer.buckets]
    assert first_use == sorted(first_use, key=lambda name: name.split(".")[1])
    return list(zip(seen[::2], seen[1::2], strict=True))


def test_forward_waits_for_what_it_uses_and_no_more():
    """Three buckets: two of weights, of the layers 2 and 1 and of layer 0, and one of all biases."""
    for seen in run_ranks(wait_in_units, parallel(2).mesh, 2, False):
        assert seen == [(3, 1), (1, 0), (0, 0)]
    for seen in run_ranks(wait_in_units, parallel(2).mesh, 2, True):
        assert seen == [(1, 1), (1, 0), (0, 0)]


def gathers(topology) -> tuple[bool, bool]:
    """Whether buckets are gathered under forward, and one by one."""
    gatherer = optimizer_of(Net(topology, torch.float32), topology, parallel(2, zero_stage=1)).gatherer
    return gatherer.overlap, gatherer.one_ahead


def test_only_ranks_of_tp_gather_one_bucket_ahead_and_a_cpu_none_under_forward():
    assert run_ranks(gathers, parallel(2).mesh, 2) == [(False, False)] * 2
    layout = dataclasses.replace(parallel(2), tensor_model_parallel_size=2)
    assert run_ranks(gathers, layout.mesh, 4) == [(False, True)] * 4


def meet_overflow(topology, stage: int) -> list[tuple[bool, float]]:
    """In fp16, one rank's gradient overflows in the second iteration."""
    net = Net(topology, torch.float16)
    adam = OptimizerConfig(initial_loss_scale=1024.0, hysteresis=1, min_loss_scale=1.0)
    optimizer = optimizer_of(net, topology, parallel(2, zero_stage=stage), adam)
    told = []
    for iteration in range(3):
        before = [parameter.detach().clone() for parameter in net.parameters()]
        optimizer.begin(1)
        scale = optimizer.scaler.scale
        if iteration == 1 and topology.dp.is_last:
            scale *= 1e30
        (net(iteration) * scale).backward()
        norm = optimizer.finish_gradients()
        optimizer.step(1e-2, 0.1, norm)
        optimizer.finish_weights()
        optimizer.scaler.update(overflowed=not norm.isfinite())
        updated = not all(torch.equal(*pair) for pair in zip(before, net.parameters(), strict=True))
        told.append((updated, optimizer.scaler.scale))
    return told


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_overflow_on_one_rank_brings_the_scale_down_on_all(stage):
    expected = [(True, 1024.0), (False, 512.0), (True, 512.0)]
    assert run_ranks(meet_overflow, parallel(2).mesh, 2, stage) == [expected] * 2


def send_rounded(topology, stage: int) -> list[torch.Tensor]:
    net = Net(topology, torch.float32)
    optimizer = optimizer_of(net, topology, parallel(2, zero_stage=stage, grad_communication_dtype="bf16"))
    optimizer.begin(1)
    net(topology.dp.rank).backward()
    own = [optimizer.gradient(name).clone() for name, _ in net.named_parameters()] if stage == 0 else []
    optimizer.finish_gradients()
    return [optimizer.gradient(name).clone() for name, _ in net.named_parameters()] + own


def test_messages_can_be_rounded():
    """The sum of two ranks is that of their rounded gradients, rounded."""
    results = run_ranks(send_rounded, parallel(2).mesh, 2, 0)
    num = len(results[0]) // 2
    for first, second, total in zip(results[0][num:], results[1][num:], results[0][:num], strict=True):
        assert torch.equal(total, (first.bfloat16() + second.bfloat16()).float())
    for stage in (1, 2):
        for sums in run_ranks(send_rounded, parallel(2).mesh, 2, stage):
            assert all(torch.equal(*pair) for pair in zip(sums, results[0][:num], strict=True))
