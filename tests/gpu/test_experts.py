"""The grouped GEMM of experts on a real GPU: any group sizes, and no wait of the host."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalite.model.grouped_linear import GemmByGroup, GroupedGemm, grouped_bias, grouped_linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZES = {
    "odd": [37, 1, 130, 89],
    "without rows": [0, 128, 0, 129],
    "one for all": [0, 0, 257, 0],
    "even": [64, 64, 64, 65],
}


def ends_of(sizes: list[int]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32).cuda()


@pytest.mark.parametrize("shape", [(64, 48), (8, 264), (1024, 520)], ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_equals_a_gemm_by_group(sizes: list[int], shape: tuple[int, int]) -> None:
    generator = torch.Generator("cuda").manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    features_in, features_out = shape
    x, weight = random(sum(sizes), features_in), random(len(sizes), features_out, features_in)
    grad, ends = random(sum(sizes), features_out), ends_of(sizes)
    assert GroupedGemm.serves(weight)
    found = []
    for kind in (GroupedGemm, GemmByGroup):
        groups = kind(ends, sum(sizes))
        y, x_grad = groups.multiply(x, weight.mT), groups.multiply(grad, weight)
        found.append((y, x_grad, groups.weight_gradient(grad, x)))
    for name, grouped, by_group in zip(("output", "x", "weight"), *found, strict=True):
        error = (grouped - by_group).double().norm() / by_group.double().norm().clamp_min(1e-30)
        assert float(error) < 4e-3, (name, float(error))
    for group, size in enumerate(sizes):
        assert size or not found[0][2][group].any()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_a_bias_is_that_of_the_rows_group(sizes: list[int]) -> None:
    weights = torch.rand(sum(sizes), device="cuda").bfloat16().requires_grad_()
    bias = torch.randn(len(sizes), 2, 24, device="cuda").bfloat16().requires_grad_()
    y = grouped_bias(weights, bias, ends_of(sizes))
    of_rows = bias.double().flatten(1).repeat_interleave(torch.tensor(sizes).cuda(), 0)
    expected = weights.double().unsqueeze(1) * of_rows
    grad = torch.randn_like(expected)
    found = (y, *torch.autograd.grad(y, (weights, bias), grad.bfloat16()))
    wanted = (expected, *torch.autograd.grad(expected, (weights, bias), grad))
    for each, right in zip(found, wanted, strict=True):
        assert float((each.double() - right.double()).norm() / right.double().norm()) < 1e-2


def test_the_host_does_not_wait() -> None:
    x = torch.randn(257, 64, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(4, 48, 64, device="cuda").bfloat16().requires_grad_()
    ends = ends_of(SIZES["odd"])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        grouped_linear(x, weight, ends).sum().backward()
        grouped_bias(x[:, 0], weight[..., 0], ends).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
