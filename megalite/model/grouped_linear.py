"""A linear layer with a weight for each group of consecutive rows.

Shapes: n rows, in and out features, groups.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite.tensor_parallel.gemm import WIDE, Gemm


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor, gemm: Gemm = WIDE) -> Tensor:
    """Multiply consecutive rows of ``[n, in]`` by the transposed weight of their group; return ``[n, out]``.

    Args:
        weight: ``[groups, ..., out, in]``; all dims between are output features.
        ends: number of rows of each group and the groups before it, int32 ``[groups]``.
        gemm: rounds the operands of the products.
    """
    y: Tensor = _GroupedLinear.apply(x, weight.flatten(1, -2), ends, gemm)
    return y


def grouped_bias(weights: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
    """Return the bias of each row's group times the row's weight, ``[n, out]``.

    It is a linear layer with one input feature, so that backward sums rows in the same order each time.

    Args:
        weights: ``[n]``.
        bias: ``[groups, ..., out]``; see `grouped_linear`.
    """
    x, weight = weights.unsqueeze(1), bias.unsqueeze(-1)
    if bias.is_cuda and bias.dtype == torch.bfloat16:  # the kernel needs more features, which are 0
        x, weight = (F.pad(each, (0, ALIGNED - 1)) for each in (x, weight))
    return grouped_linear(x, weight, ends)


ALIGNED = 8
"""Elements of bfloat16 in 16 bytes, which GPUs load at once."""


class GroupedGemm:
    """One kernel for all groups, which reads their sizes on the GPU.

    Args:
        ends: see `grouped_linear`.
        num_rows: rows of all groups.
    """

    def __init__(self, ends: Tensor, num_rows: int) -> None:
        self.ends = ends

    @staticmethod
    def serves(weight: Tensor) -> bool:
        """Return whether the kernel takes a weight ``[groups, out, in]``: it loads 16 bytes at once.

        Tensors without values stand for those of a GPU.
        """
        is_aligned = all(size % ALIGNED == 0 for size in weight.shape[1:])
        return (weight.is_cuda or weight.is_meta) and weight.dtype == torch.bfloat16 and is_aligned

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply the rows of ``[n, in]`` by their group's ``[in, out]``: ``[n, out]``."""
        return F.grouped_mm(x, weight, offs=self.ends)

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """Return ``grad^T x`` of the rows of each group, ``[groups, out, in]``."""
        return F.grouped_mm(grad.mT, x, offs=self.ends)


class GemmByGroup:
    """A GEMM for each group that has rows; the host reads their sizes. See `GroupedGemm`."""

    def __init__(self, ends: Tensor, num_rows: int) -> None:
        self.sizes = _sizes(ends, num_rows)

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply the rows of ``[n, in]`` by their group's ``[in, out]``: ``[n, out]``."""
        y = x.new_empty(x.shape[0], weight.shape[2])
        for rows, matrix, out in zip(x.split(self.sizes), weight, y.split(self.sizes), strict=True):
            if rows.shape[0]:
                torch.mm(rows, matrix, out=out)
        return y

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """Return ``grad^T x`` of the rows of each group, ``[groups, out, in]``; zero without rows."""
        gradient = x.new_empty(len(self.sizes), grad.shape[1], x.shape[1])
        for own, rows, out in zip(grad.split(self.sizes), x.split(self.sizes), gradient, strict=True):
            torch.mm(own.t(), rows, out=out)
        return gradient


class _GroupedLinear(torch.autograd.Function):
    """Products of rows and their group's matrix. The weight's gradient is of numbers that are not rounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, gemm: Gemm) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gemm = gemm
        ctx.groups = (GroupedGemm if GroupedGemm.serves(weight) else GemmByGroup)(ends, x.shape[0])
        matrices = gemm.rounded_weight(weight, sums_over_rows=False)
        y: Tensor = ctx.groups.multiply(gemm.rounded_input(x), matrices.mT)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        grad = grad.contiguous()  # the kernel refuses expanded rows
        x_grad = weight_grad = None
        if needs_x:
            matrices = ctx.gemm.rounded_weight(weight, sums_over_rows=True)
            x_grad = ctx.groups.multiply(ctx.gemm.rounded_gradient(grad), matrices)
        if needs_weight:
            weight_grad = ctx.groups.weight_gradient(grad, x)
        return x_grad, weight_grad, None, None


def _sizes(ends: Tensor, num_rows: int) -> list[int]:
    """Return the number of rows of each group; as even as possible without values, on the meta device."""
    if ends.is_meta:
        return even_sizes(num_rows, len(ends))
    return ends.diff(prepend=ends.new_zeros(1)).tolist()


def even_sizes(num_rows: int, num_groups: int) -> list[int]:
    """Return the number of rows of each group if they are divided as evenly as possible."""
    fewest, more = divmod(num_rows, num_groups)
    return [fewest + (number < more) for number in range(num_groups)]
