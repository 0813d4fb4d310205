"""Linear layers that are sharded along the tensor-parallel axis.

    layer    sequence parallel    before the GEMM                  after the GEMM
                                  forward       backward           forward           backward
    column   no                   -             all-reduce         -                 -
    column   yes                  all-gather    reduce-scatter     -                 -
    row      no                   -             -                  all-reduce        -
    row      yes                  -             -                  reduce-scatter    all-gather

(Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.)

The column layer's backward overlaps its collectives with its GEMMs. With sequence parallelism, it saves the
rank's slice of the input and gathers the input again. `gemm_collectives` can overlap the other collectives.

Shapes: s sequence, b microbatch, tp = tp.size, in and out features of a layer. ``[s/tp, b, in]`` is a rank's
slice of the sequence, ``[out/tp, in]`` its slice of a weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megalite.distributed.axis import Axis
from megalite.kernels import (
    add_weight_and_bias_gradient_,
    add_weight_gradient_,
    gelu_linear_backward,
    has_linear_gelu,
    linear_gelu,
)
from megalite.tensor_parallel.block_scaling import BlockGemm, Nvfp4Gemm
from megalite.tensor_parallel.delayed_scaling import DelayedGemm
from megalite.tensor_parallel.fp8 import TensorwiseGemm
from megalite.tensor_parallel.gemm import WIDE, Gemm, WeightGradientStore, main_grad_of
from megalite.tensor_parallel.gemm_collectives import COLLECTIVES, PendingSum, SeparateCollectives
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterSpec, new_parameter
from megalite.tensor_parallel.placement import Cut
from megalite.utils.wrapping import communication_point


@dataclass(frozen=True)
class LinearContext:
    """Settings of a linear layer's forward and backward.

    Attributes:
        collectives: runs the GEMMs whose collectives only they can hide.
        hidden_collectives: runs the GEMM of a column layer's input gradient, whose sum the GEMM of the weight
            gradient hides, unless this is stored.
        store: stores weight gradients to compute later; None to compute them in backward.
        fuses_weight_gradient: add weight gradients to `weight.main_grad` if the weight has it.
        fuses_bias_gradient: sum a bias' gradient in the GEMM of such a weight gradient, if the device can.
    """

    tp: Axis
    gemm: Gemm
    collectives: SeparateCollectives
    hidden_collectives: SeparateCollectives
    store: WeightGradientStore | None
    fuses_weight_gradient: bool
    fuses_bias_gradient: bool = True

    @staticmethod
    def of(context: LayerContext) -> LinearContext:
        """Return the part of a model's context that its linear layers need."""
        tp, store, overlap = context.tp, context.weight_gradient_store, context.overlap
        gemm, sequence_parallel = gemm_of(context), context.sequence_parallel
        separate = SeparateCollectives(gemm, tp, sequence_parallel)
        collectives = COLLECTIVES[overlap.method](gemm, tp, sequence_parallel, overlap.num_chunks)
        hidden = separate if store is None else collectives
        fuses_bias = not isinstance(gemm, BlockGemm)  # it is not the sum of rounded numbers
        return LinearContext(tp, gemm, collectives, hidden, store, context.fuses_weight_gradients, fuses_bias)

    @property
    def needs_only_autograd(self) -> bool:
        """Return whether autograd suffices: no collective, no main_grad, no weight-gradient store."""
        return self.tp.size == 1 and self.store is None and not self.fuses_weight_gradient


def gemm_of(context: LayerContext) -> Gemm:
    """Return the GEMMs of a model's linear layers."""
    settings = context.fp8
    if settings is None:
        return WIDE
    if settings.recipe == "tensorwise":
        return TensorwiseGemm(settings, context.tp)
    if settings.recipe == "delayed":
        return DelayedGemm(settings)
    if settings.recipe == "nvfp4":
        return Nvfp4Gemm(settings, context.seed, context.topology.positions)
    return BlockGemm(settings)


def gemm_of_experts(context: LayerContext) -> Gemm:
    """Return the GEMMs of experts, whose rows are in an order that depends on the layout.

    So they have no scale of a whole tensor, and do not round at random.
    """
    if context.fp8 is None or context.fp8.recipe in ("tensorwise", "delayed"):
        return WIDE
    return BlockGemm(context.fp8)


def column_linear(
    x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, context: LinearContext
) -> Tensor:
    """Compute ``x weight^T + bias`` with a weight that is cut along its output features.

    Args:
        x: ``[s, b, in]``, the same on every rank; the rank's slice ``[s/tp, b, in]`` if sequence parallel.
        weight: ``[..., out/tp, in]``; all dims but the last are output features.
        bias: ``[..., out/tp]``.

    Returns:
        ``[s, b, out/tp]``.
    """
    # Layers are compiled at tp 1 without a weight-gradient store, so a compiled call needs no collective.
    if torch.compiler.is_compiling():
        return _traced(x, weight, bias, context)
    if context.needs_only_autograd:
        return context.gemm.differentiable(x, weight, bias)
    return _apply(_ColumnLinear, x, weight, bias, context)


def row_linear(
    x: Tensor | Activated, weight: nn.Parameter, bias: nn.Parameter | None, context: LinearContext
) -> Tensor:
    """Compute ``x weight^T + bias`` with a weight that is cut along its input features.

    Args:
        x: ``[s, b, in/tp]``, the rank's features, or the result of `column_linear_gelu`.
        weight: ``[out, in/tp]``.
        bias: ``[out]``, replicated on every rank and added once, to the sum.

    Returns:
        ``[s, b, out]``, the same on every rank; the rank's slice ``[s/tp, b, out]`` if sequence parallel.
    """
    tp = context.tp
    before = before_bias = None
    if isinstance(x, Activated):
        x, before, before_bias = x
    elif torch.compiler.is_compiling():
        return _traced(x, weight, bias, context)
    elif context.needs_only_autograd:
        return context.gemm.differentiable(x, weight, bias)
    own_bias = bias if tp.size == 1 else None
    stand_in = _apply(_RowLinear, x, weight, own_bias, context, before, before_bias)

    def compute() -> Tensor:
        return context.collectives.summed_forward(x, weight.flatten(0, -2), own_bias)

    # The GEMM and its collective are not part of _RowLinear: recomputation stops at the last saved tensor,
    # before both.
    y: Tensor = _Computed.apply(stand_in, compute)
    return y if bias is None or tp.size == 1 else y.add_(bias)


class Activated(NamedTuple):
    """Result of GELU from a column layer's GEMM, for the row layer after it.

    The row layer's backward computes the gradients of `before` and the bias in one GEMM. Autograd therefore
    treats `value` as a constant.

    Attributes:
        value: ``[s, b, n]``, GELU of `before`.
        before: ``[s, b, n]``, GELU's input, with the bias added.
        bias: ``[n]``, bias of the column layer.
    """

    value: Tensor
    before: Tensor
    bias: nn.Parameter | None


def column_linear_gelu(
    x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, context: LinearContext
) -> Activated:
    """Compute `column_linear` and GELU in one GEMM, where `has_linear_gelu`.

    Args:
        x: as in `column_linear`.
        weight: ``[n, in]``.
        bias: ``[n]``.
    """
    epilogue = _GeluEpilogue(None if bias is None else bias.detach())
    value, before = _apply(_ColumnLinear, x, weight, None, context, epilogue)
    return Activated(value, before, bias)


class _GeluEpilogue(NamedTuple):
    """GEMM with a bias and GELU. The bias' gradient is computed elsewhere."""

    bias: Tensor | None


class _HiddenFromAutograd(NamedTuple):
    """Parameters hidden from autograd, which adds an edge to every bare tensor argument."""

    weight: nn.Parameter
    bias: nn.Parameter | None


def _apply(
    function: type[torch.autograd.Function],
    x: Tensor,
    weight: nn.Parameter,
    bias: nn.Parameter | None,
    context: LinearContext,
    *more: Any,
) -> Any:
    flat_weight, flat_bias = weight.flatten(0, -2), None if bias is None else bias.flatten()
    if context.store is not None:
        # Backward stores their gradients for later. Autograd must not run the hooks of parameters that have
        # no gradient yet.
        flat_weight, flat_bias = flat_weight.detach(), None if flat_bias is None else flat_bias.detach()
    return function.apply(x, flat_weight, flat_bias, _HiddenFromAutograd(weight, bias), context, *more)


class _ColumnLinear(torch.autograd.Function):
    """Gathered input times the rank's slice of the weight; backward sums the input's gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        parameters: _HiddenFromAutograd,
        context: LinearContext,
        epilogue: _GeluEpilogue | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.parameters, ctx.context = parameters, context
        if epilogue is None:
            return context.collectives.forward_of_gathered(x, weight, bias)  # [s, b, out/tp]
        x = context.collectives.start_gather(x).wait()  # [s, b, in]
        value, before = linear_gelu(x, weight.detach(), epilogue.bias)
        ctx.mark_non_differentiable(value)
        ctx.set_materialize_grads(False)  # otherwise value's gradient would be a tensor of zeros
        return value, before

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[-1]  # gradient of the GEMM's result, even if GELU follows
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        context: LinearContext = ctx.context
        collectives = context.hidden_collectives

        # The all-gather of x overlaps the GEMM of x's gradient, and the reduction of x's gradient overlaps
        # the GEMM of the weight's gradient.
        scales = context.gemm.scales(grad, weight) if needs_x else None
        # With a store, `_apply` has detached the weight: the store takes its gradient below.
        gathered_x = collectives.start_gather(x) if needs_weight else None
        x_grad: PendingSum | None = None
        if needs_x:
            x_grad = collectives.start_summed_input_gradient(grad, weight, scales)
        weight_grad = bias_grad = None
        if gathered_x is not None:
            weight_grad, bias_grad = _gradients(
                ctx.parameters.weight, grad, gathered_x.wait(), needs_bias, context
            )
        elif needs_bias:
            bias_grad = _bias_gradient(grad)
        if context.store is not None:
            _store_gradients(ctx.parameters, grad, lambda: collectives.start_gather(x).wait(), context)
        return None if x_grad is None else x_grad.wait(), weight_grad, bias_grad, None, None, None


class _RowLinear(torch.autograd.Function):
    """Tensor without memory that stands in for the result; it saves what backward needs.

    `_Computed` replaces it by the result.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        parameters: _HiddenFromAutograd,
        context: LinearContext,
        before: Tensor | None,
        before_bias: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, before)
        ctx.parameters, ctx.context = parameters, context
        num_positions = x.shape[0] // (context.tp.size if context.collectives.sequence_parallel else 1)
        return x.new_empty(1).expand(num_positions, *x.shape[1:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, before = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_, needs_before_bias = ctx.needs_input_grad
        context: LinearContext = ctx.context
        x_grad = before_grad = before_bias_grad = None
        if before is None and needs_x:
            x_grad, grad = context.collectives.input_gradient_of_gathered(grad, weight)
        else:
            grad = context.collectives.start_gather(grad).wait()  # [s, b, out]
        if before is not None:  # x = GELU(before)
            before_grad, before_bias_grad = gelu_linear_backward(grad, weight, before, needs_before_bias)
        weight_grad = bias_grad = None
        if needs_weight:
            weight_grad, bias_grad = _gradients(ctx.parameters.weight, grad, x, needs_bias, context)
        elif needs_bias:
            bias_grad = _bias_gradient(grad)
        if context.store is not None:
            _store_gradients(ctx.parameters, grad, lambda: x, context)
        return x_grad, weight_grad, bias_grad, None, None, before_grad, before_bias_grad


class _Computed(torch.autograd.Function):
    """Result of `compute`, whose gradient is the gradient of the tensor that stands in for it."""

    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        return compute()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _traced(x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, context: LinearContext) -> Tensor:
    """Compute a linear layer in a graph of torch.compile.

    Backward writes or adds the weight's gradient to `main_grad` if this has a fixed buffer.
    """
    main_grad = main_grad_of(weight) if context.fuses_weight_gradient else None
    if main_grad is None or main_grad.fixed_buffer is None:
        return context.gemm.differentiable(x, weight, bias)
    # The weight has no other gradient. Its hooks still run, because it is an input of the graph.
    y = context.gemm.differentiable(x, weight.detach(), bias)
    result: Tensor = _AddWeightGradient.apply(y, x, *main_grad.fixed_buffer, context.gemm)
    return result


class _AddWeightGradient(torch.autograd.Function):
    """Output `y` of a linear layer; backward adds the weight's gradient to `total`, in its shape."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, total: Tensor, is_written: Tensor, gemm: Gemm) -> Tensor:
        ctx.save_for_backward(x)
        ctx.gemm, ctx.total, ctx.is_written = gemm, total, is_written  # not saved: they change until then
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        factors = ctx.gemm.weight_gradient_operands(grad, x)
        add_weight_gradient_(ctx.total, *factors, is_written=ctx.is_written)
        return grad, None, None, None, None


def _gradients(
    weight: nn.Parameter, grad: Tensor, x: Tensor, needs_bias: bool, context: LinearContext
) -> tuple[Tensor | None, Tensor | None]:
    """Compute ``grad^T x``, ``[out, in]``, and the bias' gradient ``[out]`` if `needs_bias`.

    The first is None if it was added to `weight.main_grad`.
    """
    left, right = context.gemm.weight_gradient_operands(grad, x)
    main_grad = main_grad_of(weight) if context.fuses_weight_gradient else None
    if main_grad is None:
        return left.t() @ right, _bias_gradient(grad) if needs_bias else None
    total, is_stale = main_grad.claim()
    bias_grad = None
    if needs_bias and context.fuses_bias_gradient:
        bias_grad = add_weight_and_bias_gradient_(total, left, right, overwrite=is_stale)
    else:
        add_weight_gradient_(total, left, right, overwrite=is_stale)
        if needs_bias:
            bias_grad = _bias_gradient(grad)
    if context.store is not None:
        main_grad.on_added()  # without a store, autograd runs the weight's hooks
    return None, bias_grad


def _bias_gradient(grad: Tensor) -> Tensor:
    """Sum ``[s, b, out]`` -> ``[out]``."""
    return grad.flatten(0, -2).sum(0)


def _store_gradients(
    parameters: _HiddenFromAutograd, grad: Tensor, gathered_x: Callable[[], Tensor], context: LinearContext
) -> None:
    """Store the gradients of weight and bias for later; `gathered_x` returns ``[s, b, in]``.

    The store holds the input as it was saved: the rank's slice if sequence parallel.
    """
    weight, bias = parameters

    def weight_gradient() -> Tensor | None:
        gradient, _ = _gradients(weight, grad, gathered_x(), False, context)
        return None if gradient is None else gradient.view(weight.shape)

    assert context.store is not None
    context.store.put(weight, weight_gradient)
    if bias is not None:
        context.store.put(bias, lambda: _bias_gradient(grad).view(bias.shape))


class ColumnParallelLinear(nn.Module):
    """Linear layer y = x A^T + b with A cut along its output features: a rank computes a slice of y.

    Args:
        out_features: number of output features, or a shape whose last dim is cut: ``(2, ffn)`` gives every
            rank the same slice of each of SwiGLU's two halves.
        bias: add a bias, which starts at zero.
        std: std of the initial weights; `ModelConfig.init_method_std` has the same default.
        skip_bias_add: do not add `bias`; the next kernel adds it.
        fuses_gelu: add `bias` and apply GELU (tanh form) in the GEMM, if the device supports it.
        fused_rows: numbers of output features of the matrices that the weight fuses; see `ParameterSpec`.
        width_ratio: how many times wider the model is than the base model of muP; see `ParameterSpec`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | tuple[int, ...],
        context: LayerContext,
        *,
        bias: bool = True,
        std: float = 0.02,
        skip_bias_add: bool = False,
        fuses_gelu: bool = False,
        fused_rows: tuple[int, ...] = (),
        width_ratio: float = 1.0,
    ) -> None:
        super().__init__()
        self.context = LinearContext.of(context)
        out_shape = (out_features,) if isinstance(out_features, int) else tuple(out_features)
        cut = Cut("tp", len(out_shape) - 1)
        shape = (*out_shape, in_features)
        weight = ParameterSpec(shape, cut, std=std, fused_rows=fused_rows, width_ratio=width_ratio)
        self.weight = new_parameter(weight, context)  # [..., out/tp, in]
        self.bias = (
            new_parameter(ParameterSpec(out_shape, cut, decay=False), context) if bias else None
        )  # [..., out/tp]
        self.skip_bias_add = skip_bias_add
        is_whole = not self.context.collectives.splits_column_gemm
        self.fuses_gelu = fuses_gelu and self.context.gemm is WIDE and is_whole

    @communication_point
    def forward(self, x: Tensor) -> Tensor | Activated:
        """Map ``[s, b, in]``, or ``[s/tp, b, in]`` if sequence parallel, to ``[s, b, out/tp]``."""
        if self.fuses_gelu and has_linear_gelu(self.weight, self.bias is not None):
            return column_linear_gelu(x, self.weight, self.bias, self.context)
        return column_linear(x, self.weight, None if self.skip_bias_add else self.bias, self.context)


class RowParallelLinear(nn.Module):
    """Linear layer y = x A^T + b with A cut along its input features: partial results are summed.

    Args:
        bias: add a bias, which is replicated on every rank and starts at zero.
        std, width_ratio: as in `ColumnParallelLinear`.
        skip_bias_add: do not add `bias`; the next kernel adds it.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        context: LayerContext,
        *,
        bias: bool = True,
        std: float = 0.02,
        skip_bias_add: bool = False,
        width_ratio: float = 1.0,
    ) -> None:
        super().__init__()
        self.context = LinearContext.of(context)
        weight = ParameterSpec((out_features, in_features), Cut("tp", 1), std=std, width_ratio=width_ratio)
        self.weight = new_parameter(weight, context)  # [out, in/tp]
        self.bias = (
            new_parameter(ParameterSpec((out_features,), decay=False), context) if bias else None
        )  # [out], replicated on every rank
        self.skip_bias_add = skip_bias_add

    @communication_point
    def forward(self, x: Tensor | Activated) -> Tensor:
        """Map ``[s, b, in/tp]`` to ``[s, b, out]``, or to ``[s/tp, b, out]`` if sequence parallel."""
        return row_linear(x, self.weight, None if self.skip_bias_add else self.bias, self.context)


def depth_scaled_std(std: float, num_blocks: int) -> float:
    """Return the initial std of the last GEMMs of this many blocks (Radford et al. 2019)."""
    return std / math.sqrt(num_blocks)
