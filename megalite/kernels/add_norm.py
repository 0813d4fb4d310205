"""Compute norm(residual + dropout(x + bias)) and the sum, at the end of a block and the start of the next.

A GPU runs one kernel in each direction. The forward kernel does not read the sum again for the norm, and the
backward kernel also sums the bias' gradient. On a CPU `bias_dropout_add` and a norm run instead: see norm.py.
"""

from typing import Any

import torch
from torch import Tensor

from megalite.kernels.dropout_add import ResidualSum, check_sum
from megalite.kernels.library import NAMESPACE
from megalite.kernels.philox import signed64

_NAME = "bias_dropout_add_norm"
_OP, _BACKWARD = f"{NAMESPACE}::{_NAME}", f"{NAMESPACE}::{_NAME}_backward"

torch.library.define(
    _OP,
    "(Tensor x, Tensor? bias, Tensor residual, Tensor sample_numbers, float p, int key, int base, "
    "Tensor weight, Tensor? norm_bias, float epsilon) -> (Tensor, Tensor)",
)
torch.library.define(
    _BACKWARD,
    "(Tensor grad, Tensor sum_grad, Tensor sum, Tensor weight, bool centres, float epsilon, "
    "Tensor sample_numbers, float p, int key, int base) -> (Tensor, Tensor, Tensor)",
)


def bias_dropout_add_norm(
    total: ResidualSum, weight: Tensor, norm_bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return the norm of a sum, and the sum, which is rounded before the norm reads it.

    The values equal `bias_dropout_add` followed by `layer_norm`, or by `rms_norm` if `norm_bias` is None. The
    backward keeps only the sum, and adds the gradients of both outputs.

    Args:
        weight, norm_bias: parameters of the norm, ``[h]``.
    """
    x, bias, residual, p, key, sample_numbers, base = total
    check_sum(x, p, sample_numbers, base)
    normal, result = torch.ops.megalite.bias_dropout_add_norm(
        x, bias, residual, sample_numbers, p, signed64(key), base, weight, norm_bias, epsilon
    )
    return normal, result


def reference(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    sample_numbers: Tensor,
    p: float,
    key: int,
    base: int,
    weight: Tensor,
    norm_bias: Tensor | None,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """Implement the forward with the two operators."""
    ops = torch.ops.megalite
    total = ops.bias_dropout_add(x, bias, residual, sample_numbers, p, key, base)
    if norm_bias is None:
        return ops.rms_norm(total, weight, epsilon), total
    return ops.layer_norm(total, weight, norm_bias, epsilon), total


def backward_reference(
    grad: Tensor,
    sum_grad: Tensor,
    total: Tensor,
    weight: Tensor,
    centres: bool,
    epsilon: float,
    sample_numbers: Tensor,
    p: float,
    key: int,
    base: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of residual, `x` and parameters with the two operators.

    If p is 0, `x` and the residual have the same gradient, and an empty tensor is returned for `x`. The
    gradients of the parameters are one tensor: weight and bias of the norm, and the bias of `x`.
    """
    ops = torch.ops.megalite
    norm_backward = ops.layer_norm_backward if centres else ops.rms_norm_backward
    residual_grad, norm_grads = norm_backward(grad, total, weight, epsilon, sum_grad)
    x_grad, bias_grad = ops.bias_dropout_add_backward(residual_grad, sample_numbers, p, key, base)
    return residual_grad, x_grad if p else x_grad.new_empty(0), torch.cat((norm_grads, bias_grad))


torch.library.impl(_OP, "default", reference)  # on every device without a compiled kernel
torch.library.impl(_BACKWARD, "default", backward_reference)


@torch.library.register_fake(_OP)
def _fake(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


@torch.library.register_fake(_BACKWARD)
def _fake_backward(
    grad: Tensor,
    sum_grad: Tensor,
    total: Tensor,
    weight: Tensor,
    centres: bool,
    epsilon: float,
    sample_numbers: Tensor,
    p: float,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor]:
    x_grad = grad.new_empty(total.shape if p else (0,))
    return grad.new_empty(total.shape), x_grad, grad.new_empty(((3 if centres else 2) * total.shape[-1],))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, bias, _, sample_numbers, *ctx.site, weight, norm_bias, ctx.epsilon = inputs
    ctx.has_bias, ctx.centres = bias is not None, norm_bias is not None
    ctx.save_for_backward(output[1], weight, sample_numbers)


def _backward(ctx: Any, grad: Tensor, sum_grad: Tensor) -> tuple[Tensor | None, ...]:
    total, weight, sample_numbers = ctx.saved_tensors
    residual_grad, x_grad, sums = torch.ops.megalite.bias_dropout_add_norm_backward(
        grad, sum_grad, total, weight, ctx.centres, ctx.epsilon, sample_numbers, *ctx.site
    )
    weight_grad, *norm_bias_grad, bias_grad = sums.view(-1, weight.numel())
    return (
        x_grad if x_grad.numel() else residual_grad,
        bias_grad if ctx.has_bias else None,
        residual_grad,
        *(None, None, None, None),
        weight_grad,
        *(norm_bias_grad or [None]),
        None,
    )


torch.library.register_autograd(_OP, _backward, setup_context=_setup_context)
