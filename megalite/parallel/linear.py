"""The product of a linear layer that is cut over the tensor-parallel axis, with its communication.

    layer    sequence parallel    before the product                 after it
                                  forward       backward             forward           backward
    column   no                   -             all-reduce           -                 -
    column   yes                  all-gather    reduce-scatter       -                 -
    row      no                   -             -                    all-reduce        -
    row      yes                  -             -                    reduce-scatter    all-gather

(Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.) In backward the input's gradient comes
first, and its collective runs under the weight gradient's product. With sequence parallelism the slice of the
input is saved and not the whole, which backward gathers again under the input gradient's product.

Shapes: s sequence, b microbatch, t = tp.size; a layer's features are in and out, those of one rank i and o.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megalite.parallel.collectives import (
    Pending,
    reduce_from,
    scatter_sum,
    start_all_reduce,
    start_gather,
    start_scatter_sum,
)
from megalite.parallel.deferred import WeightGradients
from megalite.parallel.shard import Placement
from megalite.topology import Axis

Product = Callable[[Tensor, nn.Parameter, "nn.Parameter | None"], Tensor]
"""x, weight ``[..., i]`` and bias -> ``x weight^T + bias``; all dims of the weight but its last are one."""


def column_product(place: Placement) -> Product:
    """The product with a weight that is cut by its output features.

    It takes ``[s, b, in]`` (whole, or the rank's slice ``[s/t, b, in]`` under sequence parallelism) to
    ``[s, b, o]``.
    """
    if place.tp.size == 1:
        entry: _Entry = _Nothing()
    else:
        entry = (_GatheredSequence if place.sequence_parallel else _Copied)(place.tp)
    return _local_product(entry, place)


def row_product(place: Placement) -> Product:
    """The product with a weight that is cut by its input features.

    It takes ``[s, b, i]`` to ``[s, b, out]`` (whole, or ``[s/t, b, out]`` under sequence parallelism). The
    bias is whole on every rank and added once, to the sum.
    """
    local = _local_product(_Nothing(), place)
    if place.tp.size == 1:
        return local

    def product(x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> Tensor:
        y = local(x, weight, None)
        y = scatter_sum(y, place.tp) if place.sequence_parallel else reduce_from(y, place.tp, in_place=True)
        return y if bias is None else y.add_(bias)

    return product


class _Entry(Protocol):
    """What a product's input meets: forward, again in backward, and its gradient."""

    def enter(self, x: Tensor) -> Tensor: ...

    def enter_again(self, x: Tensor) -> Pending: ...

    def leave(self, grad: Tensor) -> Pending: ...


class _Nothing:
    """One rank's own input."""

    def enter(self, x: Tensor) -> Tensor:
        return x

    def enter_again(self, x: Tensor) -> Pending:
        return Pending(x, None)

    def leave(self, grad: Tensor) -> Pending:
        return Pending(grad, None)


class _Copied(_Nothing):
    """The same input on every rank."""

    def __init__(self, tp: Axis) -> None:
        self.tp = tp

    def leave(self, grad: Tensor) -> Pending:
        return start_all_reduce(grad, self.tp)


class _GatheredSequence:
    """A slice of the sequence on every rank, of which the product takes the whole."""

    def __init__(self, tp: Axis) -> None:
        self.tp = tp

    def enter(self, x: Tensor) -> Tensor:
        return start_gather(x, self.tp).wait()

    def enter_again(self, x: Tensor) -> Pending:
        return start_gather(x, self.tp)

    def leave(self, grad: Tensor) -> Pending:
        return start_scatter_sum(grad, self.tp)


class _Deferred(NamedTuple):
    """Parameters whose gradients are not autograd's to make, and where the products go."""

    queue: WeightGradients
    weight: nn.Parameter
    bias: nn.Parameter | None


def _local_product(entry: _Entry, place: Placement) -> Product:
    """The product of this rank's features."""
    queue = place.weight_gradients
    if queue.are_deferred:

        def product(x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> Tensor:
            detached = None if bias is None else bias.detach().flatten()
            later = _Deferred(queue, weight, bias)
            y: Tensor = _Product.apply(x, weight.detach().flatten(0, -2), detached, entry, later)
            return y

    elif place.tp.size == 1:

        def product(x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> Tensor:
            return F.linear(x, weight.flatten(0, -2), None if bias is None else bias.flatten())

    else:

        def product(x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> Tensor:
            flat = None if bias is None else bias.flatten()
            y: Tensor = _Product.apply(x, weight.flatten(0, -2), flat, entry, None)
            return y

    return product


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, entry: _Entry, deferred: _Deferred | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.entry, ctx.deferred = entry, deferred
        return _output(entry.enter(x), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        entry: _Entry = ctx.entry
        whole = entry.enter_again(x) if needs_weight else None
        x_grad = entry.leave(_input_gradient(grad, weight)) if needs_x else None
        weight_grad = _weight_gradient(grad, whole.wait()) if whole is not None else None
        bias_grad = _bias_gradient(grad) if needs_bias else None
        if ctx.deferred is not None:
            _defer(ctx.deferred, entry, x, grad)
        return None if x_grad is None else x_grad.wait(), weight_grad, bias_grad, None, None


def _output(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``[s, b, i]`` and ``[o, i]`` -> ``[s, b, o]``, the same bits whether or not the weight has a gradient.

    For torch that decides whether s and b become one dim, and the two products round differently.
    """
    return F.linear(x.contiguous(), weight.detach(), bias)


def _input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """``[s, b, o]`` and ``[o, i]`` -> ``[s, b, i]``, likewise."""
    return (grad.flatten(0, -2) @ weight).view(*grad.shape[:-1], -1)


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """``[s, b, o]`` and ``[s, b, i]`` -> ``[o, i]``."""
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)


def _bias_gradient(grad: Tensor) -> Tensor:
    """``[s, b, o]`` -> ``[o]``."""
    return grad.flatten(0, -2).sum(0)


def _defer(deferred: _Deferred, entry: _Entry, x: Tensor, grad: Tensor) -> None:
    """Leaves both parameters' gradients for later; what waits is the input as saved: a slice if it is one."""
    queue, weight, bias = deferred

    def of_weight() -> Tensor:
        return _weight_gradient(grad, entry.enter_again(x).wait()).view(weight.shape)

    queue.add(weight, of_weight)
    if bias is not None:
        queue.add(bias, lambda: _bias_gradient(grad).view(bias.shape))
