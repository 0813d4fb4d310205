"""Add a bias and apply the tanh form of GELU in one kernel. For the erf form, PyTorch is as fast."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels.library import NAMESPACE, register

_OP = f"{NAMESPACE}::bias_gelu"
_BACKWARD = f"{NAMESPACE}::bias_gelu_backward"

torch.library.define(_OP, "(Tensor x, Tensor? bias) -> Tensor")
torch.library.define(_BACKWARD, "(Tensor grad, Tensor x, Tensor? bias) -> (Tensor, Tensor)")


def bias_gelu(x: Tensor, bias: Tensor | None) -> Tensor:
    """Return y / 2 (1 + tanh(sqrt(2 / pi) (y + 0.044715 y^3))) of y = x + bias (Hendrycks and Gimpel 2016).

    It is computed in fp32 (fp64 for fp64) and rounded once. The backward sums the bias' gradient in the same
    kernel.

    Args:
        x: ``[..., n]``, fp64, fp32, bf16 or fp16.
        bias: ``[n]``, of the same dtype, or None.
    """
    result: Tensor = torch.ops.megalite.bias_gelu(x, bias)
    return result


_FLAT = 1e4


def reference(x: Tensor, bias: Tensor | None) -> Tensor:
    """Implement the operator in plain PyTorch."""
    return F.gelu(_sum(x, bias), approximate="tanh").to(x.dtype)


def backward_reference(grad: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `x` and of the bias in plain PyTorch."""
    # Beyond these numbers the derivative is 0 or 1. Without bounds, compiled code multiplies inf by 0.
    wide = _sum(x, bias).clamp(-_FLAT, _FLAT)
    result = torch.ops.aten.gelu_backward(grad.to(wide.dtype), wide, approximate="tanh")
    sums = result.new_zeros(x.shape[-1:]) if bias is None else result.flatten(0, -2).sum(0)
    return result.to(x.dtype), sums.to(x.dtype)


def _sum(x: Tensor, bias: Tensor | None) -> Tensor:
    wide = x.contiguous().to(torch.promote_types(x.dtype, torch.float32))
    return wide if bias is None else wide + bias


register(_OP, reference)
register(_BACKWARD, backward_reference)


@torch.library.register_fake(_OP)
def _fake(x: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake(_BACKWARD)
def _fake_backward(grad: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[-1:])


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | None], output: Tensor) -> None:
    x, bias = inputs
    ctx.save_for_backward(x, bias)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    x, bias = ctx.saved_tensors
    x_grad, bias_grad = torch.ops.megalite.bias_gelu_backward(grad, x, bias)
    return x_grad, None if bias is None else bias_grad.view(bias.shape)


torch.library.register_autograd(_OP, _backward, setup_context=_setup_context)
