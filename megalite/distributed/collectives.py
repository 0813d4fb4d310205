"""Collectives of tensor parallelism: one collective in forward, and its conjugate in backward.

    function          forward           backward
    reduce_from       all-reduce        identity          (g in Shoeybi et al. 2019, figure 3)
    all_gather_from   all-gather        reduce-scatter
    reduce_scatter    reduce-scatter    all-gather        (g-bar in Korthikanti et al. 2022, figure 5)

The conjugate of `reduce_from`, f in the same figure, is a part of `column_linear`. Each function is a no-op
on an axis of size 1, and returns a new tensor unless `in_place` is passed. `all_gather_from` works on the
last dim, along which activations are cut by features. `reduce_scatter` and the `start_` functions work on the
first dim, the sequence.

The `start_` functions are collectives without autograd. They overlap with the caller's computation until the
caller calls `wait` on the result.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.distributed.topology import Axis, Topology

# torch 2.13 renamed both; 2.11 has only the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def reduce_from(x: Tensor, axis: Axis, *, in_place: bool = False) -> Tensor:
    """Sum the ranks' partial `x`, of any shape; backward returns the gradient unchanged.

    Args:
        in_place: sum into `x` itself, which must be contiguous and not used elsewhere.
    """
    return x if axis.size == 1 else _Reduce.apply(x, axis, in_place)


def all_gather_from(x: Tensor, axis: Axis) -> Tensor:
    """All-gather the ranks' slices of the last dim, in the order of their coordinates.

    Backward reduce-scatters the gradients, because ranks can use different parts of the result.

    Args:
        x: ``[..., n / size]``.

    Returns:
        ``[..., n]``, the same on every rank.
    """
    return x if axis.size == 1 else _AllGather.apply(x, axis)


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """Reduce-scatter the partial `x` over the first dim; backward all-gathers the gradient.

    Args:
        x: ``[s, ...]``, s divisible by the size of the axis.

    Returns:
        ``[s / size, ...]``.
    """
    return x if axis.size == 1 else _ReduceScatter.apply(x, axis)


class Pending(NamedTuple):
    """A collective in flight.

    Attributes:
        tensor: the result; do not read it before `wait`.
        axis: axis whose observers are notified of the wait.
        what: name of the collective.
    """

    tensor: Tensor
    work: dist.Work | None
    axis: Axis | None = None
    what: str = ""

    def wait(self) -> Tensor:
        """Wait for the collective and return its result."""
        if self.work is not None:
            assert self.axis is not None
            self.axis.wait_begins(self.what)
            self.work.wait()
            self.axis.wait_ends(self.what)
        return self.tensor


def start_all_reduce(x: Tensor, axis: Axis) -> Pending:
    """Start to sum the ranks' `x` in place."""
    if axis.size == 1:
        return Pending(x, None)
    return Pending(x, dist.all_reduce(x, group=axis.group, async_op=True), axis, "all-reduce")


def start_all_gather(x: Tensor, axis: Axis) -> Pending:
    """Start an all-gather over the first dim: ``[s / size, ...]`` -> ``[s, ...]``."""
    whole = x.new_empty(axis.size * x.shape[0], *x.shape[1:])
    work = _all_gather(whole.view(-1), x.contiguous().view(-1), group=axis.group, async_op=True)
    return Pending(whole, work, axis, "all-gather")


def start_reduce_scatter(x: Tensor, axis: Axis) -> Pending:
    """Start a reduce-scatter over the first dim: ``[s, ...]`` -> ``[s / size, ...]``."""
    mine = x.new_empty(x.shape[0] // axis.size, *x.shape[1:])
    work = _reduce_scatter(mine.view(-1), x.contiguous().view(-1), group=axis.group, async_op=True)
    return Pending(mine, work, axis, "reduce-scatter")


def flat_all_gather(whole: Tensor, mine: Tensor, axis: Axis) -> Pending:
    """Start an all-gather of the ranks' flat `mine` into `whole`; `mine` can be a part of `whole`."""
    return Pending(whole, _all_gather(whole, mine, group=axis.group, async_op=True), axis, "all-gather")


def flat_reduce_scatter(mine: Tensor, whole: Tensor, axis: Axis) -> Pending:
    """Start a reduce-scatter of the ranks' flat `whole` into `mine`, which can be a part of `whole`."""
    work = _reduce_scatter(mine, whole, group=axis.group, async_op=True)
    return Pending(mine, work, axis, "reduce-scatter")


def all_reduce(
    x: Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, *, of: str = ""
) -> Tensor:
    """Reduce `x` in place over the axis, without autograd, and return it.

    Args:
        of: name of `x` for the report of a hang.
    """
    if axis.size > 1:
        axis.wait_begins("all-reduce", of)
        dist.all_reduce(x, op=op, group=axis.group)
        axis.wait_ends("all-reduce", of)
    return x


def largest_of_all(x: Tensor, topology: Topology) -> Tensor:
    """Reduce `x` in place to the elementwise maximum over all ranks, axis by axis, and return it."""
    for axis in (topology.tp, topology.dp, topology.pp):
        all_reduce(x, axis, dist.ReduceOp.MAX)
    return x


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, in_place: bool) -> Tensor:
        if in_place:
            ctx.mark_dirty(x)
            return all_reduce(x, axis)
        return all_reduce(x.clone(memory_format=torch.contiguous_format), axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        slices = x.new_empty(axis.size, *x.shape)  # [size, ..., n / size]
        flat_all_gather(slices.view(-1), x.contiguous().view(-1), axis).wait()
        return slices.movedim(0, -2).flatten(-2)  # [..., n]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        axis = ctx.axis
        slices = grad.unflatten(-1, (axis.size, -1)).movedim(-2, 0).contiguous()  # [size, ..., n / size]
        mine = grad.new_empty(slices.shape[1:])
        flat_reduce_scatter(mine.view(-1), slices.view(-1), axis).wait()
        return mine, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return start_reduce_scatter(x, axis).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return start_all_gather(grad, ctx.axis).wait(), None
