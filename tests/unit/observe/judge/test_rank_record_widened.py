"""A program that names narrow dtypes computes in fp64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megalite.observe.judge.rank_record import widened


class Narrowing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.float() * torch.ones(1, dtype=torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.to(torch.float32).to(dtype=torch.float16) / 3.0


def test_forward_and_backward_keep_64_bits() -> None:
    before = torch.get_default_dtype()
    with widened():
        torch.set_default_dtype(torch.float32)  # as some programs do
        layer = nn.Linear(3, 2, dtype=torch.float32)
        x = torch.empty(3).uniform_().requires_grad_()
        Narrowing.apply(layer(x.half())).sum().backward()
    assert torch.get_default_dtype() is before
    assert x.grad is not None and layer.weight.grad is not None
    assert {each.dtype for each in (x, x.grad, layer.weight, layer.weight.grad)} == {torch.float64}
    assert torch.allclose(layer.weight.grad, (x.detach() / 3.0).expand(2, 3), rtol=1e-14, atol=0.0)
