"""The product of a linear layer that is cut over the tensor-parallel axis, with its communication.

    layer    sequence parallel    before the product                 after it
                                  forward       backward             forward           backward
    column   no                   -             all-reduce           -                 -
    column   yes                  all-gather    reduce-scatter       -                 -
    row      no                   -             -                    all-reduce        -
    row      yes                  -             -                    reduce-scatter    all-gather

(Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.) In backward the input's gradient comes
first, and its collective runs under the weight gradient's product. With sequence parallelism the slice of the
input is saved and not the whole, which backward gathers again under the input gradient's product. Where
somebody keeps sums of the weights' gradients, the product adds to them at once.

Shapes: s sequence, b microbatch, t = tp.size; a layer's features are in and out, those of one rank i and o.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megalite.kernels import add_weight_gradient_
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


class Arithmetic(Protocol):
    """What a rank's own product computes with; it sends no tensors of the layer's."""

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``[s, b, i]`` and ``[o, i]`` -> ``[s, b, o]``."""

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Callable[[], Tensor]:
        """``[s, b, o]`` and ``[o, i]`` -> what gives ``[s, b, i]``, and sends nothing any more."""

    def traced(self, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> Tensor:
        """The product and its gradients for a graph of torch.compile, on one rank."""


class _Plain:
    """Arithmetic in the tensors' own dtype."""

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As `Arithmetic`, the same bits whether or not the weight has a gradient.

        For torch that decides whether s and b become one dim, and the two products round differently.
        """
        return F.linear(x.contiguous(), weight.detach(), bias)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Callable[[], Tensor]:
        """As `Arithmetic`, likewise."""
        return lambda: (grad.flatten(0, -2) @ weight).view(*grad.shape[:-1], -1)

    def traced(self, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> Tensor:
        return F.linear(x, weight.flatten(0, -2), None if bias is None else bias.flatten())


PLAIN = _Plain()
"""The arithmetic of every layer that has no other."""


def column_product(place: Placement, arithmetic: Arithmetic = PLAIN) -> Product:
    """The product with a weight that is cut by its output features.

    It takes ``[s, b, in]`` (whole, or the rank's slice ``[s/t, b, in]`` under sequence parallelism) to
    ``[s, b, o]``.
    """
    if place.tp.size == 1:
        entry: _Entry = _Nothing()
    else:
        entry = (_GatheredSequence if place.sequence_parallel else _Copied)(place.tp)
    return _local_product(entry, place, arithmetic)


def row_product(place: Placement, arithmetic: Arithmetic = PLAIN) -> Product:
    """The product with a weight that is cut by its input features.

    It takes ``[s, b, i]`` to ``[s, b, out]`` (whole, or ``[s/t, b, out]`` under sequence parallelism). The
    bias is whole on every rank and added once, to the sum.
    """
    local = _local_product(_Nothing(), place, arithmetic)
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


class _Owner(NamedTuple):
    """Whose gradients the backward pass makes, and what becomes of them."""

    queue: WeightGradients
    weight: nn.Parameter
    bias: nn.Parameter | None
    arithmetic: Arithmetic


def _local_product(entry: _Entry, place: Placement, arithmetic: Arithmetic) -> Product:
    """The product of this rank's features."""
    queue = place.weight_gradients
    if place.tp.size == 1 and not (queue.are_deferred or queue.are_fused):
        return arithmetic.traced

    def product(x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> Tensor:
        if torch.compiler.is_compiling():  # only at tp 1; a graph has no place for another's sums
            return arithmetic.traced(x, weight, bias)
        flat = weight.flatten(0, -2), None if bias is None else bias.flatten()
        y: Tensor = _Product.apply(x, *flat, entry, _Owner(queue, weight, bias, arithmetic))
        return y

    def deferred(x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> Tensor:
        flat = weight.detach().flatten(0, -2), None if bias is None else bias.detach().flatten()
        y: Tensor = _Product.apply(x, *flat, entry, _Owner(queue, weight, bias, arithmetic))
        return y

    return deferred if queue.are_deferred else product


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, entry: _Entry, owner: _Owner
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.entry, ctx.owner = entry, owner
        return owner.arithmetic.output(entry.enter(x), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        entry: _Entry = ctx.entry
        owner: _Owner = ctx.owner
        input_gradient = owner.arithmetic.input_gradient(grad, weight) if needs_x else None
        whole = entry.enter_again(x) if needs_weight else None
        x_grad = None if input_gradient is None else entry.leave(input_gradient())
        weight_grad = _weight_gradient(owner, grad, whole.wait()) if whole is not None else None
        bias_grad = _bias_gradient(grad) if needs_bias else None
        if owner.queue.are_deferred:
            _defer(owner, entry, x, grad)
        return None if x_grad is None else x_grad.wait(), weight_grad, bias_grad, None, None


def _weight_gradient(owner: _Owner, grad: Tensor, x: Tensor) -> Tensor | None:
    """``[s, b, o]`` and ``[s, b, i]`` -> ``[o, i]``, or nothing: it is in the weight's sum of gradients."""
    grad, x = grad.flatten(0, -2), x.flatten(0, -2)
    kept = owner.queue.sums.get(owner.weight)
    if kept is None:
        return grad.t() @ x
    add_weight_gradient_(kept.tensor().flatten(0, -2), grad, x)
    if owner.queue.are_deferred:
        kept.arrived()
    return None


def _bias_gradient(grad: Tensor) -> Tensor:
    """``[s, b, o]`` -> ``[o]``."""
    return grad.flatten(0, -2).sum(0)


def _defer(owner: _Owner, entry: _Entry, x: Tensor, grad: Tensor) -> None:
    """Leaves both parameters' gradients for later; what waits is the input as saved: a slice if it is one."""
    queue, weight, bias, _ = owner

    def of_weight() -> Tensor | None:
        gradient = _weight_gradient(owner, grad, entry.enter_again(x).wait())
        return None if gradient is None else gradient.view(weight.shape)

    queue.add(weight, of_weight)
    if bias is not None:
        queue.add(bias, lambda: _bias_gradient(grad).view(bias.shape))
