"""Rows are multiplied by their factors wherever a shard begins and ends, and a bad update changes nothing."""

from __future__ import annotations

import pytest
import torch

from megalite.config import ModelConfig, OptimizerConfig, ParallelConfig
from megalite.optim.optimizer import Optimizer
from megalite.optim.post_step_hooks import MeasuredHeads, QKClip, _multiply_rows
from megalite.tensor_parallel.parameter_spec import ParameterShard, ParameterSpec
from megalite.tensor_parallel.placement import Cut

CONFIG = ModelConfig(
    hidden_size=8,
    num_attention_heads=4,
    num_query_groups=2,
    qk_clip=True,
    qk_clip_threshold=2.0,
    qk_clip_alpha=0.25,
)


@pytest.mark.parametrize("shape", [(5, 4), (20,), (5, 2, 2)])
def test_every_shard_of_the_rows(shape):
    factors = torch.arange(1.0, shape[0] + 1)
    expected = (torch.ones(shape) * factors.view(-1, *[1] * (len(shape) - 1))).flatten()
    for start in range(20):
        for end in range(start, 21):
            part = torch.ones(end - start)
            spec = ParameterSpec(shape)
            _multiply_rows(ParameterShard(part, start, shape, spec, is_replicated=False), factors)
            assert torch.equal(part, expected[start:end]), (start, end)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [False, True])
def test_one_group_of_two_is_scaled(make_parameter, topology, dtype, bad):
    weight = make_parameter(16, 8, cut=Cut("tp", 0), dtype=dtype)
    bias = make_parameter(16, cut=Cut("tp", 0), decay=False, dtype=dtype)
    before = weight.detach().clone(), bias.detach().clone()
    largest = torch.tensor([1.0, 8.0, -3.0, 1.5])
    optimizer = Optimizer(
        [("qkv.weight", weight), ("qkv.bias", bias)],
        None,
        OptimizerConfig(weight_decay=0.0),
        ParallelConfig(),
        topology,
        dtype,
    )
    heads = MeasuredHeads(weight, bias, largest)
    optimizer.post_step_hooks = [QKClip(CONFIG, topology, [heads], optimizer.updated)]
    optimizer.begin(1)
    assert (largest == -torch.inf).all()
    largest.copy_(torch.tensor([1.0, 8.0, -3.0, 1.5]))
    norm = optimizer.finish_gradients()  # no gradient: only the scores change the weights
    optimizer.step(0.1, 0.0, norm * torch.nan if bad else norm)
    factors = torch.ones(16, dtype=torch.float64)
    if not bad:
        factors[:4], factors[4:6] = 0.25**0.25, 0.25**0.75  # two query heads of 2, their key, and the value
    for found, old in zip((weight, bias), before, strict=True):
        expected = old.double() * (factors[:, None] if found.dim() == 2 else factors)
        torch.testing.assert_close(
            found.detach(), expected.to(dtype), rtol=8e-3 if dtype.itemsize == 2 else 1e-6, atol=0
        )
    mains = [state.main for state in optimizer.states if state.has_own_main]
    assert len(mains) == (2 if dtype.itemsize == 2 else 0)
    for state in optimizer.states:
        if state.has_own_main:
            assert torch.equal(state.rounded, state.main.to(dtype))
