"""Add a bias and apply SwiGLU in one kernel: SiLU of the first half of the features gates the second half.

Source: Shazeer 2020.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels.library import NAMESPACE, register

_OP = f"{NAMESPACE}::bias_swiglu"
_BACKWARD = f"{NAMESPACE}::bias_swiglu_backward"

torch.library.define(_OP, "(Tensor x, Tensor? bias) -> Tensor")
torch.library.define(_BACKWARD, "(Tensor grad, Tensor x, Tensor? bias) -> (Tensor, Tensor)")


def bias_swiglu(x: Tensor, bias: Tensor | None) -> Tensor:
    """Return silu(g) * u, where g and u are the two halves of x + bias.

    It is computed in fp32 (fp64 for fp64) and rounded once. The backward keeps only `x`, writes the gradients
    of both halves to one tensor, and sums the bias' gradient in the same kernel.

    Args:
        x: ``[..., 2 n]``, fp64, fp32, bf16 or fp16.
        bias: ``[2, n]``, of the same dtype, or None.

    Returns:
        ``[..., n]``.
    """
    result: Tensor = torch.ops.megalite.bias_swiglu(x, bias)
    return result


def reference(x: Tensor, bias: Tensor | None) -> Tensor:
    """Implement the operator in plain PyTorch."""
    gate, up = _halves(x, bias)
    return (F.silu(gate) * up).to(x.dtype)


def backward_reference(grad: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `x` and of the bias (as ``[2 n]``) in plain PyTorch."""
    gate, up = _halves(x, bias)
    wide = grad.to(gate.dtype)
    grad_gate = torch.ops.aten.silu_backward(wide * up, gate)
    result = torch.cat((grad_gate, wide * F.silu(gate)), dim=-1)
    sums = result.new_zeros(x.shape[-1:]) if bias is None else result.flatten(0, -2).sum(0)
    return result.to(x.dtype), sums.to(x.dtype)


def _halves(x: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide if bias is None else wide + bias.flatten()).chunk(2, dim=-1)


register(_OP, reference)
register(_BACKWARD, backward_reference)


@torch.library.register_fake(_OP)
def _fake(x: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@torch.library.register_fake(_BACKWARD)
def _fake_backward(grad: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[-1:])


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | None], output: Tensor) -> None:
    x, bias = inputs
    ctx.save_for_backward(x, bias)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    x, bias = ctx.saved_tensors
    x_grad, bias_grad = torch.ops.megalite.bias_swiglu_backward(grad, x, bias)
    return x_grad, None if bias is None else bias_grad.view(bias.shape)


torch.library.register_autograd(_OP, _backward, setup_context=_setup_context)
