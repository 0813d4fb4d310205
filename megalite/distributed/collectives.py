"""Collectives of tensor parallelism: one collective in forward, and its conjugate in backward.

    function                              forward               backward
    copy_to_tensor_parallel               identity              all-reduce        (f in Shoeybi et al. 2019)
    reduce_from_tensor_parallel           all-reduce            identity          (g, figure 3 there)
    scatter_to_tensor_parallel            slice of the last     all-gather
    gather_from_tensor_parallel           all-gather, last      slice
    all_gather_from                       all-gather, last      reduce-scatter
    scatter_to_sequence_parallel          slice of the first    all-gather
    gather_from_sequence_parallel         all-gather, first     reduce-scatter    (g in Korthikanti et al.)
    reduce_scatter_to_sequence_parallel   reduce-scatter        all-gather        (g-bar, 2022, figure 5)

First and last are dims: activations are cut by the sequence along the first, by features along the last.
Each function is a no-op on an axis of size 1. It returns a new tensor otherwise, unless `in_place` is passed.

A full value is the same on every rank, and so is its gradient. A rank has a slice of a cut value, and of its
gradient. Partial values add up to the full one. Each function takes one kind and returns another; its
backward converts the gradient in the other direction. docs/python_api.md has examples.

The `start_` functions are collectives without autograd. They overlap with the caller's computation until the
caller calls `wait` on the result. `of` names the tensor for the report of a hang.

`OverlapSlots` overlaps two computations: one computes while messages of the other are in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from threading import Semaphore, Thread
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.distributed.axis import Axis
from megalite.distributed.topology import Topology
from megalite.utils.errors import UserError

# torch 2.13 renamed both; 2.11 has only the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def copy_to_tensor_parallel(x: Tensor, tp: Axis) -> Tensor:
    """Return a full `x`, of any shape, for use by cut channels; backward sums its gradient over the ranks.

    Each rank uses `x` for its own channels, so its gradient there is partial: without the sum, all that is
    computed before `x` gets a wrong gradient. `ColumnParallelLinear` does it for its own input. f in Shoeybi
    et al. 2019, figure 3; Megatron-LM's `copy_to_tensor_model_parallel_region`.

    Args:
        x: full, the same on every rank: an activation or a whole parameter.
        tp: `LayerContext.tp`.
    """
    return with_conjugate(x, tp, _itself, _summed)


def reduce_from_tensor_parallel(x: Tensor, tp: Axis, *, in_place: bool = False) -> Tensor:
    """Sum the ranks' partial `x`, of any shape; backward returns the gradient unchanged.

    Use it for a sum over channels, features or tokens of the vocabulary that are cut over the ranks.
    `RowParallelLinear` does it for its own result. g in Shoeybi et al. 2019, figure 3; Megatron-LM's
    `reduce_from_tensor_model_parallel_region`.

    Args:
        in_place: sum into `x` itself, which must be contiguous and not used elsewhere.

    Returns:
        The full sum, the same on every rank.
    """
    return x if tp.size == 1 else _Reduce.apply(x, tp, in_place)


def scatter_to_tensor_parallel(x: Tensor, tp: Axis) -> Tensor:
    """Return this rank's slice of the last dim of a full `x`; backward all-gathers the gradient.

    Megatron-LM's `scatter_to_tensor_model_parallel_region`.

    Args:
        x: ``[..., n]``, n divisible by tp.

    Returns:
        ``[..., n/tp]``.
    """
    return with_conjugate(x, tp, _own_features, _gathered_features)


def gather_from_tensor_parallel(x: Tensor, tp: Axis) -> Tensor:
    """All-gather the ranks' slices of the last dim into a full value; backward takes the gradient's slice.

    The full value must be used by every rank alike, since its gradient is taken for full. If cut channels use
    it, pass the result to `copy_to_tensor_parallel`. In Megatron-LM:
    `gather_from_tensor_model_parallel_region`.

    Args:
        x: ``[..., n/tp]``.

    Returns:
        ``[..., n]``, in the order of the ranks' coordinates.
    """
    return with_conjugate(x, tp, _gathered_features, _own_features)


def all_gather_from(x: Tensor, tp: Axis) -> Tensor:
    """All-gather the ranks' slices of the last dim, for use by cut channels.

    It is `gather_from_tensor_parallel` and `copy_to_tensor_parallel` with one collective in backward.

    Args:
        x: ``[..., n/tp]``.

    Returns:
        ``[..., n]``, in the order of the ranks' coordinates.
    """
    return with_conjugate(x, tp, _gathered_features, _reduce_scattered_features)


def scatter_to_sequence_parallel(x: Tensor, tp: Axis) -> Tensor:
    """Return this rank's slice of the sequence of a full `x`; backward all-gathers the gradient.

    Megatron-LM's `scatter_to_sequence_parallel_region`.

    Args:
        x: ``[s, ...]``, s divisible by tp.

    Returns:
        ``[s/tp, ...]``.
    """
    return with_conjugate(x, tp, _own_positions, _gathered_positions)


def gather_from_sequence_parallel(x: Tensor, tp: Axis) -> Tensor:
    """All-gather the ranks' slices of the sequence, for use by cut channels.

    With sequence parallelism it takes the place of `copy_to_tensor_parallel`: backward reduce-scatters the
    gradient, which is partial on each rank. Megatron-LM's `gather_from_sequence_parallel_region`.

    Args:
        x: ``[s/tp, ...]``.

    Returns:
        ``[s, ...]``.
    """
    return with_conjugate(x, tp, _gathered_positions, _reduce_scattered_positions)


def reduce_scatter_to_sequence_parallel(x: Tensor, tp: Axis) -> Tensor:
    """Sum the ranks' partial `x` and return this rank's slice of the sequence; backward all-gathers.

    With sequence parallelism it takes the place of `reduce_from_tensor_parallel`. Megatron-LM's
    `reduce_scatter_to_sequence_parallel_region`.

    Args:
        x: ``[s, ...]``, s divisible by tp.

    Returns:
        ``[s/tp, ...]``.
    """
    return with_conjugate(x, tp, _reduce_scattered_positions, _gathered_positions)


class Messages(NamedTuple):
    """Messages in flight, which end together."""

    works: Sequence[dist.Work]

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self.works:
            work.wait()


class Pending(NamedTuple):
    """Collective in flight.

    Attributes:
        tensor: the result; do not read it before `wait`.
        axis: axis whose observers are notified of the wait.
        what: name of the collective.
        of: name of the tensor for the report of a hang.
    """

    tensor: Tensor
    work: dist.Work | Messages | None
    axis: Axis | None = None
    what: str = ""
    of: str = ""

    def wait(self) -> Tensor:
        """Wait for the collective and return its result."""
        if self.work is not None:
            assert self.axis is not None
            self.axis.wait_begins(self.what, self.of)
            self.work.wait()
            self.axis.wait_ends(self.what, self.of)
        return self.tensor


def start_all_reduce(x: Tensor, axis: Axis) -> Pending:
    """Start to sum the ranks' `x` in place."""
    if axis.size == 1:
        return Pending(x, None)
    return Pending(x, dist.all_reduce(x, group=axis.group, async_op=True), axis, "all-reduce")


def start_all_gather(x: Tensor, axis: Axis, *, of: str = "") -> Pending:
    """Start an all-gather over the first dim: ``[s / size, ...]`` -> ``[s, ...]``."""
    if axis.size == 1:
        return Pending(x, None)
    whole = x.new_empty(axis.size * x.shape[0], *x.shape[1:])
    work = all_gather_single(whole.view(-1), x.contiguous().view(-1), group=axis.group, async_op=True)
    return Pending(whole, work, axis, "all-gather", of)


def start_reduce_scatter(x: Tensor, axis: Axis, *, of: str = "") -> Pending:
    """Start a reduce-scatter over the first dim: ``[s, ...]`` -> ``[s / size, ...]``."""
    if axis.size == 1:
        return Pending(x, None)
    mine = x.new_empty(x.shape[0] // axis.size, *x.shape[1:])
    work = reduce_scatter_single(mine.view(-1), x.contiguous().view(-1), group=axis.group, async_op=True)
    return Pending(mine, work, axis, "reduce-scatter", of)


def start_shift(x: Tensor, num_received: int, distance: int, axis: Axis, *, of: str = "") -> Pending:
    """Start to send a flat `x` to the rank `distance` places after this one, counted in a ring.

    Args:
        num_received: number of elements from the rank `distance` places before this one. Without elements
            there is no message.
    """
    received = x.new_empty(num_received)
    to, source = ((axis.rank + step) % axis.size for step in (distance, -distance))
    messages = []
    if received.numel():
        messages.append(dist.P2POp(dist.irecv, received, group=axis.group, group_peer=source))
    if x.numel():
        messages.append(dist.P2POp(dist.isend, x, group=axis.group, group_peer=to))
    works = dist.batch_isend_irecv(messages) if messages else ()
    return Pending(received, Messages(works), axis, "shift", of)


def flat_all_gather(whole: Tensor, mine: Tensor, axis: Axis, *, of: str = "") -> Pending:
    """Start an all-gather of the ranks' flat `mine` into `whole`; `mine` can be a part of `whole`."""
    work = all_gather_single(whole, mine, group=axis.group, async_op=True)
    return Pending(whole, work, axis, "all-gather", of)


def flat_reduce_scatter(mine: Tensor, whole: Tensor, axis: Axis) -> Pending:
    """Start a reduce-scatter of the ranks' flat `whole` into `mine`, which can be a part of `whole`."""
    work = reduce_scatter_single(mine, whole, group=axis.group, async_op=True)
    return Pending(mine, work, axis, "reduce-scatter")


def start_all_to_all(
    x: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], axis: Axis, *, of: str = ""
) -> Pending:
    """Start to send a range of a flat `x` to each rank; the result has the ranges from the ranks, in order.

    Args:
        send_sizes: number of elements for each rank of the axis.
        receive_sizes: number of elements from each rank.
    """
    if axis.size == 1:
        return Pending(x, None)
    received = x.new_empty(sum(receive_sizes))
    sizes = list(receive_sizes), list(send_sizes)
    work = dist.all_to_all_single(received, x, *sizes, group=axis.group, async_op=True)
    return Pending(received, work, axis, "all-to-all", of)


def all_to_all(
    x: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], axis: Axis, *, of: str = ""
) -> Tensor:
    """Run `start_all_to_all`, and wait for the result."""
    return start_all_to_all(x, send_sizes, receive_sizes, axis, of=of).wait()


def all_reduce(
    x: Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM, *, of: str = ""
) -> Tensor:
    """Reduce `x` in place over the axis, without autograd, and return it."""
    if axis.size > 1:
        axis.wait_begins("all-reduce", of)
        dist.all_reduce(x, op=op, group=axis.group)
        axis.wait_ends("all-reduce", of)
    return x


def largest_of_all(x: Tensor, topology: Topology) -> Tensor:
    """Reduce `x` in place to the elementwise maximum over all ranks, axis by axis, and return it."""
    for axis in topology.axes.values():
        all_reduce(x, axis, dist.ReduceOp.MAX)
    return x


Collective = Callable[[Tensor, Axis], Tensor]
"""Maps a rank's tensor to its result; without autograd."""


def with_conjugate(x: Tensor, axis: Axis, forward: Collective, backward: Collective) -> Tensor:
    """Return ``forward(x, axis)``, or `x` on an axis of size 1; `backward` maps the gradient."""
    return x if axis.size == 1 else _WithConjugate.apply(x, axis, forward, backward)


class _WithConjugate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, forward: Collective, backward: Collective) -> Tensor:
        ctx.axis, ctx.conjugate = axis, backward
        return forward(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.conjugate(grad, ctx.axis), None, None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Axis, in_place: bool) -> Tensor:
        if not in_place:
            return _summed(x, tp)
        ctx.mark_dirty(x)
        return all_reduce(x, tp)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


def _itself(x: Tensor, tp: Axis) -> Tensor:
    return x.view_as(x)


def _summed(x: Tensor, tp: Axis) -> Tensor:
    return all_reduce(x.clone(memory_format=torch.contiguous_format), tp)


def _own_slice(x: Tensor, tp: Axis, dim: int) -> Tensor:
    if x.shape[dim] % tp.size != 0:
        raise UserError(f"dim {dim} of {tuple(x.shape)} cannot be cut over --tp {tp.size}")
    return x.chunk(tp.size, dim)[tp.rank].contiguous()


def _own_features(x: Tensor, tp: Axis) -> Tensor:
    return _own_slice(x, tp, -1)


def _gathered_features(x: Tensor, tp: Axis) -> Tensor:
    slices = x.new_empty(tp.size, *x.shape)  # [tp, ..., n/tp]
    flat_all_gather(slices.view(-1), x.contiguous().view(-1), tp).wait()
    return slices.movedim(0, -2).flatten(-2)


def _reduce_scattered_features(x: Tensor, tp: Axis) -> Tensor:
    slices = x.unflatten(-1, (tp.size, -1)).movedim(-2, 0).contiguous()  # [tp, ..., n/tp]
    mine = x.new_empty(slices.shape[1:])
    flat_reduce_scatter(mine.view(-1), slices.view(-1), tp).wait()
    return mine


def _own_positions(x: Tensor, tp: Axis) -> Tensor:
    return _own_slice(x, tp, 0)


def _gathered_positions(x: Tensor, tp: Axis) -> Tensor:
    return start_all_gather(x, tp).wait()


def _reduce_scattered_positions(x: Tensor, tp: Axis) -> Tensor:
    return start_reduce_scatter(x, tp).wait()


T = TypeVar("T")


class OverlapSlots:
    """Two computations that alternate: each calls `yield_slot` before it waits for messages in flight.

    Only one of them runs at a time. They switch only in `yield_slot` and when one ends, so every
    rank launches its collectives in the same order, and a GPU runs the kernels of both on one stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slot = 0  # number of the computation that runs
        self._may_run = (Semaphore(0), Semaphore(0))
        self._are_two = False

    def run(self, first: Callable[[], T], second: Callable[[], T]) -> list[T]:
        """Run two computations, and return the results of both; the second one runs in a thread.

        An error of the first one is raised at once, since the other can wait for messages that never come.
        """
        results: list[Any] = []

        def run_second() -> None:
            self._may_run[1].acquire()
            try:
                with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
                    results.append(second())
            except BaseException as error:
                results.append(error)
            self._end()

        thread = Thread(target=run_second, daemon=True)
        self._slot, self._may_run, self._are_two = 0, (Semaphore(0), Semaphore(0)), True
        thread.start()
        try:
            own = first()
        finally:
            self._end()
        thread.join()
        if isinstance(results[0], BaseException):
            raise results[0]
        return [own, results[0]]

    def yield_slot(self) -> None:
        """Let the other computation run until it yields or ends; without another one, do nothing."""
        if self._are_two:
            mine, self._slot = self._slot, 1 - self._slot
            self._may_run[self._slot].release()
            self._may_run[mine].acquire()

    def _end(self) -> None:
        """Let the other computation run to its end."""
        self._slot, self._are_two = 1 - self._slot, False
        self._may_run[self._slot].release()
