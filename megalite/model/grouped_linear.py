"""A linear layer with a weight for each group of consecutive rows.

Shapes: n rows, in and out features, groups.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply consecutive rows of ``[n, in]`` by the transposed weight of their group; return ``[n, out]``.

    Args:
        weight: ``[groups, ..., out, in]``; all dims between are output features.
        ends: number of rows of each group and the groups before it, int32 ``[groups]``.
    """
    weight = weight.flatten(1, -2)
    product = GroupedGemm if GroupedGemm.serves(weight) else GemmByGroup
    y: Tensor = product.apply(x, weight, ends)
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


class GroupedGemm(torch.autograd.Function):
    """Runs one kernel for all groups, which reads their sizes on the GPU."""

    @staticmethod
    def serves(weight: Tensor) -> bool:
        """Return whether the kernel takes a weight ``[groups, out, in]``: it loads 16 bytes at once.

        Tensors without values stand for those of a GPU.
        """
        is_aligned = all(size % ALIGNED == 0 for size in weight.shape[1:])
        return (weight.is_cuda or weight.is_meta) and weight.dtype == torch.bfloat16 and is_aligned

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return F.grouped_mm(x, weight.mT, offs=ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, ends = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        grad = grad.contiguous()  # the kernel refuses expanded rows
        x_grad = F.grouped_mm(grad, weight, offs=ends) if needs_x else None
        weight_grad = F.grouped_mm(grad.mT, x, offs=ends) if needs_weight else None
        return x_grad, weight_grad, None


class GemmByGroup(torch.autograd.Function):
    """Runs one GEMM for each group that has rows; the host reads their sizes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes = _sizes(ends, x.shape[0])
        y = x.new_empty(x.shape[0], weight.shape[1])
        for rows, matrix, out in zip(x.split(ctx.sizes), weight, y.split(ctx.sizes), strict=True):
            if rows.shape[0]:
                torch.mm(rows, matrix.t(), out=out)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        x_grad = torch.empty_like(x) if needs_x else None
        weight_grad = torch.empty_like(weight) if needs_weight else None
        start = 0
        for number, size in enumerate(ctx.sizes):
            rows = slice(start, start + size)
            start += size
            if size and x_grad is not None:
                torch.mm(grad[rows], weight[number], out=x_grad[rows])
            if weight_grad is not None:  # of a group without rows, it is zero
                torch.mm(grad[rows].t(), x[rows], out=weight_grad[number])
        return x_grad, weight_grad, None


def _sizes(ends: Tensor, num_rows: int) -> list[int]:
    """Return the number of rows of each group; as even as possible without values, on the meta device."""
    if ends.is_meta:
        return even_sizes(num_rows, len(ends))
    return ends.diff(prepend=ends.new_zeros(1)).tolist()


def even_sizes(num_rows: int, num_groups: int) -> list[int]:
    """Return the number of rows of each group if they are divided as evenly as possible."""
    fewest, more = divmod(num_rows, num_groups)
    return [fewest + (number < more) for number in range(num_groups)]
