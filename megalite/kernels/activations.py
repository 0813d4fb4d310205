"""Add a bias and apply GELU or SwiGLU in one kernel.

GELU has its tanh form here; for the erf form, PyTorch is as fast. Both operators compute in fp32 (fp64 for
fp64) and round once. Their backwards keep only `x`, and sum the bias' gradient in the same kernel.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels.library import define, like_first

_FLAT = 1e4  # beyond this number the derivative of GELU is 0 or 1


def bias_gelu(x: Tensor, bias: Tensor | None) -> Tensor:
    """Return y / 2 (1 + tanh(sqrt(2 / pi) (y + 0.044715 y^3))) of y = x + bias (Hendrycks and Gimpel 2016).

    Args:
        x: ``[..., n]``, fp64, fp32, bf16 or fp16.
        bias: ``[n]``, of the same dtype, or None.
    """
    result: Tensor = torch.ops.megalite.bias_gelu(x, bias)
    return result


def bias_swiglu(x: Tensor, bias: Tensor | None) -> Tensor:
    """Return silu(g) * u, where g and u are the two halves of x + bias (Shazeer 2020).

    The backward writes the gradients of both halves to one tensor.

    Args:
        x: ``[..., 2 n]``, fp64, fp32, bf16 or fp16.
        bias: ``[2, n]``, of the same dtype, or None.

    Returns:
        ``[..., n]``.
    """
    result: Tensor = torch.ops.megalite.bias_swiglu(x, bias)
    return result


def gelu_reference(x: Tensor, bias: Tensor | None) -> Tensor:
    """Implement `bias_gelu` in plain PyTorch."""
    return F.gelu(_sum(x, bias), approximate="tanh").to(x.dtype)


def gelu_backward_reference(grad: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `x` and of the bias in plain PyTorch."""
    wide = _sum(x, bias).clamp(-_FLAT, _FLAT)  # without bounds, compiled code multiplies inf by 0
    return _gradients(torch.ops.aten.gelu_backward(grad.to(wide.dtype), wide, approximate="tanh"), x, bias)


def swiglu_reference(x: Tensor, bias: Tensor | None) -> Tensor:
    """Implement `bias_swiglu` in plain PyTorch."""
    gate, up = _sum(x, bias).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def swiglu_backward_reference(grad: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `x` and of the bias (as ``[2 n]``) in plain PyTorch."""
    gate, up = _sum(x, bias).chunk(2, dim=-1)
    wide = grad.to(gate.dtype)
    grad_gate = torch.ops.aten.silu_backward(wide * up, gate)
    return _gradients(torch.cat((grad_gate, wide * F.silu(gate)), dim=-1), x, bias)


def _sum(x: Tensor, bias: Tensor | None) -> Tensor:
    """Return x + bias in at least fp32."""
    wide = x.contiguous().to(torch.promote_types(x.dtype, torch.float32))
    return wide if bias is None else wide + bias.flatten()


def _gradients(x_grad: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the gradient of `x` and its sum over the rows, rounded; zeros for the sum without a bias."""
    sums = x_grad.new_zeros(x.shape[-1:]) if bias is None else x_grad.flatten(0, -2).sum(0)
    return x_grad.to(x.dtype), sums.to(x.dtype)


def _fake_swiglu(x: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _fake_backward(grad: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[-1:])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor | None], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiated_by(op: Callable[..., Any]) -> Callable[..., Any]:
    """Return the backward of an activation from the operator of its gradients."""

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, bias = ctx.saved_tensors  # read once: recomputation frees them then
        x_grad, bias_grad = op(grad, x, bias)
        return x_grad, None if bias is None else bias_grad.view(bias.shape)

    return backward


for _name, _forward, _fake, _backward in (
    ("bias_gelu", gelu_reference, like_first, gelu_backward_reference),
    ("bias_swiglu", swiglu_reference, _fake_swiglu, swiglu_backward_reference),
):
    define(
        f"{_name}_backward",
        "(Tensor grad, Tensor x, Tensor? bias) -> (Tensor, Tensor)",
        _backward,
        _fake_backward,
        compiled=_backward,
    )
    define(
        _name,
        "(Tensor x, Tensor? bias) -> Tensor",
        _forward,
        _fake,
        save=_save,
        backward=_differentiated_by(getattr(torch.ops.megalite, f"{_name}_backward")),
        compiled=_forward,
    )
