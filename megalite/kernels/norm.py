"""Compute LayerNorm and RMSNorm over the last dim, with one kernel in each direction.

On a CPU we use PyTorch's LayerNorm: ours took 0.7 to 1.1 times as long in fp32 and bf16, and twice as long in
fp16.

In the forward, `bias_dropout_add` adds the residual. One kernel for both would save at most 4 to 8% of the
time of the two on a CPU (1024 tokens of 768 and of 4096 features, fp32 and bf16, one thread of a busy Zen 4).
`bias_dropout_add_norm` is this kernel on a GPU, at the end of a block and the start of the next: its forward
does not read the sum again for the norm, and its backward also sums the bias' gradient. The backward of the
norm adds the residual's gradient, which saves an addition over three tensors by autograd.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels.dropout import ResidualSum, check_sum
from megalite.kernels.library import define, is_compiled, is_eager, like_first
from megalite.kernels.philox import signed64


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + epsilon) * weight (Zhang and Sennrich 2019).

    It is computed in fp32 (fp64 for fp64) and rounded once. The backward keeps only `x`. It computes the
    statistics of a row again while it reads the row, and sums the weight's gradient in the same kernel, in an
    order that depends only on the shape (on a GPU also on whether rows begin at multiples of 16 bytes).

    Args:
        x: ``[..., h]``, fp64, fp32, bf16 or fp16.
        weight: ``[h]``, of the same dtype.
    """
    result: Tensor = torch.ops.megalite.rms_norm(x, weight, epsilon)
    return result


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """Return (x - mean) / sqrt(var + epsilon) * weight + bias for each row (Ba et al. 2016).

    Args:
        x: ``[..., h]``, fp64, fp32, bf16 or fp16.
        weight, bias: ``[h]``, of the same dtype.
    """
    result: Tensor = torch.ops.megalite.layer_norm(x, weight, bias, epsilon)
    return result


def rms_norm_with_residual(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return `rms_norm(x)`, and `x` itself for the residual connection around the block after the norm.

    If the residual connection uses the returned `x`, the norm's backward adds both gradients in its own
    kernel, in fp32, and rounds once.
    """
    normal, residual = _WithResidual.apply(x, weight, None, epsilon)
    return normal, residual


def layer_norm_with_residual(
    x: Tensor, weight: Tensor, bias: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return `layer_norm(x)` and `x`, like `rms_norm_with_residual`."""
    normal, residual = _WithResidual.apply(x, weight, bias, epsilon)
    return normal, residual


class NormFunctions(NamedTuple):
    """Functions of one norm for one type of device.

    Attributes:
        alone: maps x and the norm's parameters to norm(x).
        with_residual: maps x and the norm's parameters to norm(x) and x.
        norm_of_sum: maps a `ResidualSum` and the norm's parameters to the norm of the sum, and the sum.
    """

    alone: Callable[..., Tensor]
    with_residual: Callable[..., tuple[Tensor, Tensor]]
    norm_of_sum: Callable[..., tuple[Tensor, Tensor]]


def rms_norm_on(device_type: str) -> NormFunctions:
    """Return `rms_norm`, or PyTorch's if ours would run eagerly: PyTorch's is faster than the reference."""
    if _is_eager("rms_norm", device_type):
        return _and_input(_torch_rms_norm)
    adds = _adds_and_normalizes(device_type)
    norm_of_sum = _rms_norm_of_sum if adds else after_sum(rms_norm_with_residual)
    return NormFunctions(rms_norm, rms_norm_with_residual, norm_of_sum)


def layer_norm_on(device_type: str) -> NormFunctions:
    """Return `layer_norm` on a GPU; on a CPU return PyTorch's, which is as fast as ours would be."""
    if _is_eager("layer_norm", device_type):
        return _and_input(_torch_layer_norm)
    adds = _adds_and_normalizes(device_type)
    norm_of_sum = bias_dropout_add_norm if adds else after_sum(layer_norm_with_residual)
    return NormFunctions(layer_norm, layer_norm_with_residual, norm_of_sum)


def _is_eager(op: str, device_type: str) -> bool:
    """Return whether PyTorch's norm is faster than ours. The meta device is treated like a GPU with ours."""
    return device_type != "meta" and is_eager(op, device_type)


def _adds_and_normalizes(device_type: str) -> bool:
    """Return whether one kernel computes a sum and its norm."""
    return device_type == "meta" or is_compiled("bias_dropout_add_norm", device_type)


def _and_input(norm: Callable[..., Tensor]) -> NormFunctions:
    """Return the functions of a norm for which autograd, not the backward, adds the residual's gradient."""

    def with_residual(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return norm(x, *rest), x

    return NormFunctions(norm, with_residual, after_sum(with_residual))


def after_sum(with_residual: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the norm of a sum, where a separate operator computes the sum."""
    return lambda total, *rest: with_residual(total.compute(), *rest)


def _rms_norm_of_sum(total: ResidualSum, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    return bias_dropout_add_norm(total, weight, None, epsilon)


def _torch_rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, epsilon)


def _torch_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, epsilon)


def rms_reference(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Implement RMSNorm in plain PyTorch."""
    return _torch_rms_norm(_wide(x), _wide(weight), epsilon).to(x.dtype)


def layer_reference(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """Implement LayerNorm in plain PyTorch."""
    return _torch_layer_norm(_wide(x), _wide(weight), _wide(bias), epsilon).to(x.dtype)


def rms_backward_reference(
    grad: Tensor, x: Tensor, weight: Tensor, epsilon: float, residual_grad: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `x`, plus the residual's gradient, and of the weight in plain PyTorch."""
    inverse = (_wide(x).square().mean(-1, keepdim=True) + epsilon).rsqrt()
    normal, upper = _wide(x) * inverse, _wide(grad)
    weighted = upper * _wide(weight)
    grad_x = inverse * (weighted - normal * (weighted * normal).mean(-1, keepdim=True))
    return _with(residual_grad, grad_x).to(x.dtype), _summed(upper * normal).to(x.dtype)


def layer_backward_reference(
    grad: Tensor, x: Tensor, weight: Tensor, epsilon: float, residual_grad: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the same for LayerNorm; the gradients of weight and bias are one tensor, ``[2 h]``."""
    centred = _wide(x) - _wide(x).mean(-1, keepdim=True)
    inverse = (centred.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    normal, upper = centred * inverse, _wide(grad)
    weighted = upper * _wide(weight)
    grad_x = weighted - weighted.mean(-1, keepdim=True) - normal * (weighted * normal).mean(-1, keepdim=True)
    sums = torch.cat((_summed(upper * normal), _summed(upper)))
    return _with(residual_grad, inverse * grad_x).to(x.dtype), sums.to(x.dtype)


def _with(residual_grad: Tensor | None, grad_x: Tensor) -> Tensor:
    return grad_x if residual_grad is None else grad_x + residual_grad


def _wide(x: Tensor) -> Tensor:
    return x.contiguous().to(torch.promote_types(x.dtype, torch.float32))


def _summed(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).sum(0)


def _fake_rms_backward(grad: Tensor, x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[-1:])


def _fake_layer_backward(grad: Tensor, x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty((2 * x.shape[-1],))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.epsilon = inputs[-1]


def _rms_backward(ctx: Any, grad: Tensor, residual_grad: Tensor | None = None) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    return *torch.ops.megalite.rms_norm_backward(grad, x, weight, ctx.epsilon, residual_grad), None


def _layer_backward(ctx: Any, grad: Tensor, residual_grad: Tensor | None = None) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    grad_x, sums = torch.ops.megalite.layer_norm_backward(grad, x, weight, ctx.epsilon, residual_grad)
    return grad_x, *sums.chunk(2), None


define(
    "rms_norm",
    "(Tensor x, Tensor weight, float epsilon) -> Tensor",
    rms_reference,
    like_first,
    save=_save,
    backward=_rms_backward,
    compiled=rms_reference,
)
define(
    "layer_norm",
    "(Tensor x, Tensor weight, Tensor bias, float epsilon) -> Tensor",
    layer_reference,
    like_first,
    save=_save,
    backward=_layer_backward,
    compiled=layer_reference,
)
for _name, _reference, _fake in (
    ("rms_norm_backward", rms_backward_reference, _fake_rms_backward),
    ("layer_norm_backward", layer_backward_reference, _fake_layer_backward),
):
    define(
        _name,
        "(Tensor grad, Tensor x, Tensor weight, float epsilon, Tensor? residual_grad=None) "
        "-> (Tensor, Tensor)",
        _reference,
        _fake,
        compiled=_reference,
    )


class _WithResidual(torch.autograd.Function):
    """Norm and its input as outputs of one autograd node, so that its backward gets both gradients.

    This is not an operator, because an operator must not return its input.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.centres, ctx.epsilon = bias is not None, epsilon
        # A graph of torch.compile fuses PyTorch's norm with the sum before it. The backward is still our
        # kernel: the compiler's would read the rows twice, because it also sums over them for the weight's
        # gradient.
        is_traced = torch.compiler.is_compiling()
        rms, layer = (_torch_rms_norm, _torch_layer_norm) if is_traced else (rms_norm, layer_norm)
        return (rms(x, weight, epsilon) if bias is None else layer(x, weight, bias, epsilon)), x

    @staticmethod
    def backward(ctx: Any, grad: Tensor, residual_grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.centres:
            return _layer_backward(ctx, grad, residual_grad)
        grad_x, grad_weight, _ = _rms_backward(ctx, grad, residual_grad)
        return grad_x, grad_weight, None, None


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


def sum_reference(
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


def sum_backward_reference(
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


def _fake_sum(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _fake_sum_backward(
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


def _save_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, bias, _, sample_numbers, *ctx.site, weight, norm_bias, ctx.epsilon = inputs
    ctx.has_bias, ctx.centres = bias is not None, norm_bias is not None
    ctx.save_for_backward(output[1], weight, sample_numbers)


def _sum_backward(ctx: Any, grad: Tensor, sum_grad: Tensor) -> tuple[Tensor | None, ...]:
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


define(
    "bias_dropout_add_norm",
    "(Tensor x, Tensor? bias, Tensor residual, Tensor sample_numbers, float p, int key, int base, "
    "Tensor weight, Tensor? norm_bias, float epsilon) -> (Tensor, Tensor)",
    sum_reference,
    _fake_sum,
    save=_save_sum,
    backward=_sum_backward,
)
define(
    "bias_dropout_add_norm_backward",
    "(Tensor grad, Tensor sum_grad, Tensor sum, Tensor weight, bool centres, float epsilon, "
    "Tensor sample_numbers, float p, int key, int base) -> (Tensor, Tensor, Tensor)",
    sum_backward_reference,
    _fake_sum_backward,
)
