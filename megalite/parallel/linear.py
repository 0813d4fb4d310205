"""Linear layers that are cut over the tensor-parallel axis.

    layer    sequence parallel    before the GEMM                  after the GEMM
                                  forward       backward           forward           backward
    column   no                   -             all-reduce         -                 -
    column   yes                  all-gather    reduce-scatter     -                 -
    row      no                   -             -                  all-reduce        -
    row      yes                  -             -                  reduce-scatter    all-gather

(Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.)

The column layer's backward overlaps its collectives with its GEMMs. With sequence parallelism it saves the
rank's slice of the input, and gathers the input again.

Shapes: s sequence, b microbatch, t = tp.size; a layer's features are in and out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
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
from megalite.parallel.fp8 import Fp8Gemm
from megalite.parallel.shard import ParameterSpec, Placement, Shard, new_parameter
from megalite.parallel.weight_gradient_store import WeightGradientStore, main_grad_of
from megalite.topology import Axis


class Gemm(Protocol):
    """The GEMMs of a rank's own slice, in 16 bits and more (`PlainGemm`) or in 8 (`Fp8Gemm`)."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``[s, b, in]`` and ``[out, in]`` -> ``x weight^T + bias``, ``[s, b, out]``."""

    def scales(self, grad: Tensor, weight: Tensor) -> Tensor | None:
        """Agree over tp on the scales of `input_gradient`'s factors; None where it needs none."""

    def input_gradient(self, grad: Tensor, weight: Tensor, scales: Tensor | None) -> Tensor:
        """``[s, b, out]`` and ``[out, in]`` -> ``grad weight``, ``[s, b, in]``."""

    def traced(self, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> Tensor:
        """As `forward`, differentiable by autograd and by torch.compile, for one rank."""


class PlainGemm:
    """GEMMs in the tensors' own dtype."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute ``x weight^T + bias``."""
        # torch picks its kernel by whether the weight requires grad, and the kernels round differently.
        # A detached weight gives the same bits with and without gradients.
        return F.linear(x.contiguous(), weight.detach(), bias)

    def scales(self, grad: Tensor, weight: Tensor) -> Tensor | None:
        """Return None: nothing is scaled."""
        return None

    def input_gradient(self, grad: Tensor, weight: Tensor, scales: Tensor | None) -> Tensor:
        """Compute ``grad weight``."""
        return (grad.flatten(0, -2) @ weight).view(*grad.shape[:-1], -1)

    def traced(self, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> Tensor:
        """Compute ``x weight^T + bias``."""
        return F.linear(x, weight.flatten(0, -2), None if bias is None else bias.flatten())


@dataclass(frozen=True)
class LinearContext:
    """What a linear layer's forward and backward need besides tensors.

    Attributes:
        store: takes weight gradients for later; None to compute them in backward.
        fuses_weight_gradient: add weight gradients to `weight.main_grad` if the weight has one.
    """

    tp: Axis
    sequence_parallel: bool
    gemm: Gemm
    store: WeightGradientStore | None
    fuses_weight_gradient: bool

    @staticmethod
    def of(place: Placement) -> LinearContext:
        """Return the context of the layers at `place`."""
        return LinearContext(
            place.tp,
            place.sequence_parallel and place.tp.size > 1,
            PlainGemm() if place.fp8_format is None else Fp8Gemm(place.fp8_format, place.tp),
            place.weight_gradient_store,
            place.fuses_weight_gradients,
        )

    @property
    def is_plain(self) -> bool:
        """Whether autograd alone does all that the layer needs: no collective, no main_grad, no store."""
        return self.tp.size == 1 and self.store is None and not self.fuses_weight_gradient


def column_linear(
    x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, context: LinearContext
) -> Tensor:
    """Compute ``x weight^T + bias`` with a weight that is cut by its output features.

    Args:
        x: ``[s, b, in]``, the same on every rank; the rank's slice ``[s/t, b, in]`` if sequence parallel.
        weight: ``[..., out/t, in]``; all dims but the last are output features.
        bias: ``[..., out/t]``.

    Returns:
        ``[s, b, out/t]``.
    """
    # torch.compile traces a layer at tp 1 only. Its graph cannot add to main_grad.
    if context.is_plain or torch.compiler.is_compiling():
        return context.gemm.traced(x, weight, bias)
    return _apply(_ColumnLinear, x, weight, bias, context)


def row_linear(x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, context: LinearContext) -> Tensor:
    """Compute ``x weight^T + bias`` with a weight that is cut by its input features.

    Args:
        x: ``[s, b, in/t]``, the rank's features.
        weight: ``[out, in/t]``.
        bias: ``[out]``, whole on every rank and added once, to the sum.

    Returns:
        ``[s, b, out]``, the same on every rank; the rank's slice ``[s/t, b, out]`` if sequence parallel.
    """
    tp = context.tp
    if context.is_plain or torch.compiler.is_compiling():
        return context.gemm.traced(x, weight, bias)
    if tp.size == 1:
        return _apply(_RowLinear, x, weight, bias, context)
    y = _apply(_RowLinear, x, weight, None, context)
    # The collective is no part of _RowLinear: recomputation stops at the last saved tensor, before it.
    y = scatter_sum(y, tp) if context.sequence_parallel else reduce_from(y, tp, in_place=True)
    return y if bias is None else y.add_(bias)


class _Parameters(NamedTuple):
    """The parameters, in a tuple: autograd would add an edge for a bare argument."""

    weight: nn.Parameter
    bias: nn.Parameter | None


def _apply(
    function: type[torch.autograd.Function],
    x: Tensor,
    weight: nn.Parameter,
    bias: nn.Parameter | None,
    context: LinearContext,
) -> Tensor:
    """Apply one of the Functions below with weight ``[out, in]`` and bias ``[out]``.

    They are detached if their gradients are stored for later: autograd must not run the hooks of parameters
    in backward that have no gradient yet.
    """
    flat_weight, flat_bias = weight.flatten(0, -2), None if bias is None else bias.flatten()
    if context.store is not None:
        flat_weight, flat_bias = flat_weight.detach(), None if flat_bias is None else flat_bias.detach()
    y: Tensor = function.apply(x, flat_weight, flat_bias, _Parameters(weight, bias), context)
    return y


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        parameters: _Parameters,
        context: LinearContext,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameters, ctx.context = parameters, context
        if context.sequence_parallel:
            x = start_gather(x, context.tp).wait()  # [s/t, b, in] -> [s, b, in]
        return context.gemm.forward(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        context: LinearContext = ctx.context
        tp, gemm = context.tp, context.gemm

        def start_whole_x() -> Pending:
            return start_gather(x, tp) if context.sequence_parallel else Pending(x, None)

        # The gather of x runs under the GEMM of x's gradient, the sum of x's gradient under the GEMM of the
        # weight's.
        scales = gemm.scales(grad, weight) if needs_x else None
        whole_x = start_whole_x() if needs_weight else None
        x_grad: Pending | None = None
        if needs_x:
            partial_sum = gemm.input_gradient(grad, weight, scales)  # [s, b, in]
            if context.sequence_parallel:
                x_grad = start_scatter_sum(partial_sum, tp)  # [s/t, b, in]
            else:
                x_grad = start_all_reduce(partial_sum, tp)
        weight_grad = None
        if whole_x is not None:
            weight_grad = _weight_gradient(ctx.parameters.weight, grad, whole_x.wait(), context)
        bias_grad = _bias_gradient(grad) if needs_bias else None
        if context.store is not None:
            _store_gradients(ctx.parameters, grad, lambda: start_whole_x().wait(), context)
        return None if x_grad is None else x_grad.wait(), weight_grad, bias_grad, None, None


class _RowLinear(torch.autograd.Function):
    """The GEMM alone: `row_linear` sums its result over the ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        parameters: _Parameters,
        context: LinearContext,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameters, ctx.context = parameters, context
        return context.gemm.forward(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        context: LinearContext = ctx.context
        x_grad = None
        if needs_x:
            x_grad = context.gemm.input_gradient(grad, weight, context.gemm.scales(grad, weight))
        weight_grad = _weight_gradient(ctx.parameters.weight, grad, x, context) if needs_weight else None
        bias_grad = _bias_gradient(grad) if needs_bias else None
        if context.store is not None:
            _store_gradients(ctx.parameters, grad, lambda: x, context)
        return x_grad, weight_grad, bias_grad, None, None


def _weight_gradient(weight: nn.Parameter, grad: Tensor, x: Tensor, context: LinearContext) -> Tensor | None:
    """``[s, b, out]`` and ``[s, b, in]`` -> ``[out, in]``, or None if it was added to `weight.main_grad`."""
    grad, x = grad.flatten(0, -2), x.flatten(0, -2)
    main_grad = main_grad_of(weight) if context.fuses_weight_gradient else None
    if main_grad is None:
        return grad.t() @ x
    add_weight_gradient_(main_grad.buffer().flatten(0, -2), grad, x)
    if context.store is not None:
        main_grad.on_added()  # without a store autograd runs the weight's hooks, with no gradient
    return None


def _bias_gradient(grad: Tensor) -> Tensor:
    """``[s, b, out]`` -> ``[out]``."""
    return grad.flatten(0, -2).sum(0)


def _store_gradients(
    parameters: _Parameters, grad: Tensor, whole_x: Callable[[], Tensor], context: LinearContext
) -> None:
    """Store the gradients of weight and bias for later; `whole_x` returns ``[s, b, in]``.

    The store holds the input as it was saved: the rank's slice if sequence parallel.
    """
    weight, bias = parameters

    def weight_gradient() -> Tensor | None:
        gradient = _weight_gradient(weight, grad, whole_x(), context)
        return None if gradient is None else gradient.view(weight.shape)

    assert context.store is not None
    context.store.put(weight, weight_gradient)
    if bias is not None:
        context.store.put(bias, lambda: _bias_gradient(grad).view(bias.shape))


class ColumnParallelLinear(nn.Module):
    """Compute y = x A^T + b with A cut by its output features: each rank computes its slice of y.

    Args:
        out_shape: shape of the output features. Only its last dim is cut: ``(2, ffn)`` gives every rank the
            same slice of each of SwiGLU's two halves.
        adds_bias: False to leave `bias` to the kernel that follows.
        std: of the initial weights.
    """

    def __init__(
        self,
        in_features: int,
        out_shape: tuple[int, ...],
        place: Placement,
        *,
        bias: bool,
        std: float,
        adds_bias: bool = True,
    ) -> None:
        super().__init__()
        self.context = LinearContext.of(place)
        shard = Shard("tp", len(out_shape) - 1)
        weight = ParameterSpec((*out_shape, in_features), shard, std=std)  # [..., out, in]
        self.weight = new_parameter(weight, place)  # [..., out/t, in]
        self.bias = (
            new_parameter(ParameterSpec(out_shape, shard, decay=False), place) if bias else None
        )  # [..., out/t]
        self.adds_bias = adds_bias

    def forward(self, x: Tensor) -> Tensor:
        """``[s, b, in]``, or ``[s/t, b, in]`` if sequence parallel -> ``[s, b, prod(out_shape)/t]``."""
        return column_linear(x, self.weight, self.bias if self.adds_bias else None, self.context)


class RowParallelLinear(nn.Module):
    """Compute y = x A^T + b with A cut by its input features: the ranks' partial results are summed.

    Args:
        adds_bias: False to leave `bias` to the kernel that follows.
        std: of the initial weights.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        place: Placement,
        *,
        bias: bool,
        std: float,
        adds_bias: bool = True,
    ) -> None:
        super().__init__()
        self.context = LinearContext.of(place)
        weight = ParameterSpec((out_features, in_features), Shard("tp", 1), std=std)
        self.weight = new_parameter(weight, place)  # [out, in/t]
        self.bias = (
            new_parameter(ParameterSpec((out_features,), decay=False), place) if bias else None
        )  # [out], whole on every rank
        self.adds_bias = adds_bias

    def forward(self, x: Tensor) -> Tensor:
        """``[s, b, in/t]`` -> ``[s, b, out]``, or ``[s/t, b, out]`` if sequence parallel."""
        return row_linear(x, self.weight, self.bias if self.adds_bias else None, self.context)


def depth_scaled_std(std: float, num_layers: int) -> float:
    """Return std / sqrt(2 L), the initial std of GEMMs that add to the residual (Radford et al. 2019)."""
    return std / math.sqrt(2.0 * num_layers)
