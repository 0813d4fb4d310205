"""Add a bias and apply GELU or SwiGLU in one kernel, or GELU in a GEMM.

GELU has its tanh form here; for the erf form, PyTorch is as fast. Both operators compute in fp32 (fp64 for
fp64) and round once. Their backwards keep only `x`, and sum the bias' gradient in the same kernel.

On a GPU, cuBLASLt can compute GELU before a GEMM writes its result, and its derivative in the backward GEMM
after it, without these kernels. torch has already loaded cuBLASLt, and our CUDA library looks it up at run
time. Autograd does not see these operators: the linear layers before and after GELU call them.

Shapes: n tokens, i and o in and out features of the linear layer before GELU, h out features of the one
after it.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels.library import define, is_compiled, like_first, passes_trial

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


_NAME = "linear_gelu"
_ALIGNED = 8
"""The rows of GELU's input must start at a multiple of this many elements."""
_TOLERANCE = 2.0**-6
"""Largest error of the test at start-up, relative to the largest magnitude: two roundings to bf16 and a
different summation order."""


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return GELU(x weight^T + bias) and its input, both rounded once.

    Args:
        x: ``[..., i]``, bf16 or fp16.
        weight: ``[o, i]``.
        bias: ``[o]``.
    """
    value, before = torch.ops.megalite.linear_gelu(x, weight, bias)
    return value, before


def gelu_linear_backward(
    grad: Tensor, weight: Tensor, before: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of `before`, and with a bias its sum over the tokens, the gradient of the bias.

    Args:
        grad: ``[..., h]``, gradient of the output of the linear layer after GELU.
        weight: ``[h, o]``, weight of this layer.
        before: ``[..., o]``, input of GELU.
    """
    before_grad, sums = torch.ops.megalite.gelu_linear_backward(grad, weight, before, has_bias)
    return before_grad, sums if has_bias else None


def linear_gelu_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Implement the forward in plain PyTorch."""
    before = F.linear(x, weight, bias)
    return F.gelu(before, approximate="tanh"), before


def gelu_linear_backward_reference(
    grad: Tensor, weight: Tensor, before: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor]:
    """Implement the backward in plain PyTorch; without a bias the sums are an empty tensor."""
    before_grad, sums = gelu_backward_reference(grad @ weight, before, before.new_zeros(before.shape[-1]))
    return before_grad, sums if has_bias else sums.new_empty(0)


def _fake_linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    value = x.new_empty((*x.shape[:-1], weight.shape[0]))
    return value, torch.empty_like(value)


def _fake_gelu_linear_backward(
    grad: Tensor, weight: Tensor, before: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor]:
    return before.new_empty(before.shape), before.new_empty(before.shape[-1] if has_bias else 0)


define(
    _NAME,
    "(Tensor x, Tensor weight, Tensor? bias) -> (Tensor, Tensor)",
    linear_gelu_reference,
    _fake_linear_gelu,
)
define(
    "gelu_linear_backward",
    "(Tensor grad, Tensor weight, Tensor before, bool has_bias) -> (Tensor, Tensor)",
    gelu_linear_backward_reference,
    _fake_gelu_linear_backward,
)


def has_linear_gelu(weight: Tensor, has_bias: bool) -> bool:
    """Return whether a GPU has both operators, for this weight ``[o, i]`` of the layer before GELU.

    They run once, on small tensors, and must agree with the references; otherwise a warning is logged.
    """
    o, i = weight.shape
    is_16_bit = weight.dtype in (torch.bfloat16, torch.float16)
    if not (weight.is_cuda and is_16_bit and o % _ALIGNED == 0 and is_compiled(_NAME, "cuda")):
        return False
    return _agrees(i % _ALIGNED, has_bias, weight.dtype, weight.device)


@functools.cache
def _agrees(unaligned: int, has_bias: bool, dtype: torch.dtype, device: torch.device) -> bool:
    """Test the operators with rows whose length is `unaligned` more than a multiple of 8."""
    return passes_trial(
        lambda: _difference(64 + unaligned, has_bias, dtype, device),
        "GELU runs in separate kernels, not in the GEMMs of cuBLASLt",
    )


def _difference(i: int, has_bias: bool, dtype: torch.dtype, device: torch.device) -> str:
    """Return which result of the operators differs from its linear_gelu_reference, or an empty string."""

    def numbers(*shape: int) -> Tensor:
        """Return numbers of both signs, without a random number generator, whose state would change."""
        return torch.arange(math.prod(shape), device=device).mul(1.618).sin().view(shape).to(dtype)

    n, o = 24, 128
    x, weight, bias = numbers(n, i), numbers(o, i) / 8, numbers(o) if has_bias else None
    value, before = linear_gelu_reference(x, weight, bias)
    after = 1 + numbers(n, i), numbers(i, o) / 8, before, has_bias
    found = *linear_gelu(x, weight, bias), *torch.ops.megalite.gelu_linear_backward(*after)
    names = "GELU", "GELU's input", "its gradient", "the gradient of the bias"
    for name, result, expected in zip(
        names, found, (value, before, *gelu_linear_backward_reference(*after)), strict=True
    ):
        error = (result - expected).abs()
        if result.numel() and not bool(error.max() <= _TOLERANCE * expected.abs().max()):
            return f"{name} in {dtype} differs from PyTorch's"
    return ""
