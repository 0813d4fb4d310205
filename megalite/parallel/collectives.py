"""The collectives of tensor parallelism, each with its pair: what runs forward and what runs backward.

    function            forward       backward         conjugate of
    copy_to             identity      all-reduce       reduce_from   (f in Shoeybi et al. 2019, figure 3)
    reduce_from         all-reduce    identity         copy_to       (g in the same figure)
    gather_from         all-gather    reduce-scatter

Each is a no-op on an axis of size 1. None changes its input.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.topology import Axis

# torch 2.13 renamed both; 2.11 knows the old names alone.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """Enters a parallel region: every rank uses the same `x`, so the gradients of its uses are summed."""
    return x if axis.size == 1 else _Copy.apply(x, axis)


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """Leaves a parallel region: sums the ranks' partial `x`, of any one shape."""
    return x if axis.size == 1 else _Reduce.apply(x, axis)


def gather_from(x: Tensor, axis: Axis) -> Tensor:
    """Joins the ranks' slices of the last dim, in the order of their coordinate.

    Backward sums the ranks' gradients and gives each its slice: ranks may use different parts of the whole.

    Args:
        x: ``[..., n / size]``.

    Returns:
        ``[..., n]``, the same on every rank.
    """
    return x if axis.size == 1 else _Gather.apply(x, axis)


def all_reduce(x: Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduces `x` in place over the axis, outside autograd; returns it."""
    if axis.size > 1:
        dist.all_reduce(x, op=op, group=axis.group)
    return x


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.axis), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return all_reduce(x.clone(memory_format=torch.contiguous_format), axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        slices = x.new_empty(axis.size, *x.shape)  # [size, ..., n / size]
        _all_gather(slices.view(-1), x.contiguous().view(-1), group=axis.group)
        return slices.movedim(0, -2).flatten(-2)  # [..., n]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        axis = ctx.axis
        slices = grad.unflatten(-1, (axis.size, -1)).movedim(-2, 0).contiguous()  # [size, ..., n / size]
        mine = grad.new_empty(slices.shape[1:])
        _reduce_scatter(mine.view(-1), slices.view(-1), group=axis.group)
        return mine, None
