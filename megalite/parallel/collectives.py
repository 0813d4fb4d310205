"""The collectives of tensor parallelism, each with its pair: what runs forward and what runs backward.

    function       forward           backward          conjugate of
    copy_to        identity          all-reduce        reduce_from   (f in Shoeybi et al. 2019, figure 3)
    reduce_from    all-reduce        identity          copy_to       (g in the same figure)
    gather_from    all-gather        reduce-scatter
    scatter_sum    reduce-scatter    all-gather        (g-bar in Korthikanti et al. 2022, figure 5)

Each is a no-op on an axis of size 1. None changes its input unless told so. `gather_from` works on the last
dim, where activations are cut by features; `scatter_sum` and the `start_` functions on the first dim, the
sequence.

The `start_` functions are plain collectives, outside autograd, that run while the caller computes: backward
passes put other work before the `wait` of what they return.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.topology import Axis, Topology

# torch 2.13 renamed both; 2.11 knows the old names alone.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """Enters a parallel region: every rank uses the same `x`, so the gradients of its uses are summed."""
    return x if axis.size == 1 else _Copy.apply(x, axis)


def reduce_from(x: Tensor, axis: Axis, *, in_place: bool = False) -> Tensor:
    """Leaves a parallel region: sums the ranks' partial `x`, of any one shape.

    Args:
        in_place: sum into `x` itself, which is contiguous and which nothing else needs.
    """
    return x if axis.size == 1 else _Reduce.apply(x, axis, in_place)


def gather_from(x: Tensor, axis: Axis) -> Tensor:
    """Joins the ranks' slices of the last dim, in the order of their coordinate.

    Backward sums the ranks' gradients and gives each its slice: ranks may use different parts of the whole.

    Args:
        x: ``[..., n / size]``.

    Returns:
        ``[..., n]``, the same on every rank.
    """
    return x if axis.size == 1 else _Gather.apply(x, axis)


def scatter_sum(x: Tensor, axis: Axis) -> Tensor:
    """Leaves a parallel region for a sequence-parallel one: sums the partial `x`, each rank keeps its slice.

    Args:
        x: ``[s, ...]``, s divisible by the axis' size.

    Returns:
        ``[s / size, ...]``.
    """
    return x if axis.size == 1 else _ScatterSum.apply(x, axis)


class Pending(NamedTuple):
    """A collective on its way.

    Attributes:
        tensor: its result, not to be read before `wait`.
        axis: what it runs over, for who wants to know where a rank waits.
        what: the collective's name.
    """

    tensor: Tensor
    work: dist.Work | None
    axis: Axis | None = None
    what: str = ""

    def wait(self) -> Tensor:
        """The result."""
        if self.work is not None:
            assert self.axis is not None
            self.axis.wait_begins(self.what)
            self.work.wait()
            self.axis.wait_ends(self.what)
        return self.tensor


def start_all_reduce(x: Tensor, axis: Axis) -> Pending:
    """Sums the ranks' `x` in place."""
    if axis.size == 1:
        return Pending(x, None)
    return Pending(x, dist.all_reduce(x, group=axis.group, async_op=True), axis, "all-reduce")


def start_gather(x: Tensor, axis: Axis) -> Pending:
    """Joins the ranks' slices of the first dim: ``[s / size, ...]`` -> ``[s, ...]``."""
    whole = x.new_empty(axis.size * x.shape[0], *x.shape[1:])
    work = _all_gather(whole.view(-1), x.contiguous().view(-1), group=axis.group, async_op=True)
    return Pending(whole, work, axis, "all-gather")


def start_scatter_sum(x: Tensor, axis: Axis) -> Pending:
    """Sums the ranks' `x` and keeps this rank's slice: ``[s, ...]`` -> ``[s / size, ...]``."""
    mine = x.new_empty(x.shape[0] // axis.size, *x.shape[1:])
    work = _reduce_scatter(mine.view(-1), x.contiguous().view(-1), group=axis.group, async_op=True)
    return Pending(mine, work, axis, "reduce-scatter")


def flat_gather(whole: Tensor, mine: Tensor, axis: Axis) -> Pending:
    """Starts to join the ranks' flat tensors in `whole`, of which `mine` may be this rank's part."""
    return Pending(whole, _all_gather(whole, mine, group=axis.group, async_op=True), axis, "all-gather")


def flat_scatter_sum(mine: Tensor, whole: Tensor, axis: Axis) -> Pending:
    """Starts to sum the ranks' flat tensors, of which `mine` gets this rank's part; it may lie in `whole`."""
    work = _reduce_scatter(mine, whole, group=axis.group, async_op=True)
    return Pending(mine, work, axis, "reduce-scatter")


def all_reduce(x: Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduces `x` in place over the axis, outside autograd; returns it."""
    if axis.size > 1:
        axis.wait_begins("all-reduce")
        dist.all_reduce(x, op=op, group=axis.group)
        axis.wait_ends("all-reduce")
    return x


def largest_of_all(x: Tensor, topology: Topology) -> Tensor:
    """Takes each element's largest value of any rank, in place, axis by axis; returns it."""
    for axis in (topology.tp, topology.dp, topology.pp):
        all_reduce(x, axis, dist.ReduceOp.MAX)
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
    def forward(ctx: Any, x: Tensor, axis: Axis, in_place: bool) -> Tensor:
        if in_place:
            ctx.mark_dirty(x)
            return all_reduce(x, axis)
        return all_reduce(x.clone(memory_format=torch.contiguous_format), axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        slices = x.new_empty(axis.size, *x.shape)  # [size, ..., n / size]
        flat_gather(slices.view(-1), x.contiguous().view(-1), axis).wait()
        return slices.movedim(0, -2).flatten(-2)  # [..., n]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        axis = ctx.axis
        slices = grad.unflatten(-1, (axis.size, -1)).movedim(-2, 0).contiguous()  # [size, ..., n / size]
        mine = grad.new_empty(slices.shape[1:])
        flat_scatter_sum(mine.view(-1), slices.view(-1), axis).wait()
        return mine, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return start_scatter_sum(x, axis).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return start_gather(grad, ctx.axis).wait(), None
