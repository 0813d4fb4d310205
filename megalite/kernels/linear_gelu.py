"""Apply the tanh form of GELU in the GEMM before it, and its derivative in the backward GEMM after it.

On a GPU, cuBLASLt computes both before a GEMM writes its result, without the kernels of `bias_gelu`. torch
has already loaded cuBLASLt, and our CUDA library looks it up at run time. Autograd does not see these
operators: the linear layers before and after GELU call them.

Shapes: n tokens, i and o in and out features of the linear layer before GELU, h out features of the one
after it.
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels.activations import gelu_backward_reference
from megalite.kernels.library import define, is_compiled, passes_trial

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


def reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Implement the forward in plain PyTorch."""
    before = F.linear(x, weight, bias)
    return F.gelu(before, approximate="tanh"), before


def backward_reference(grad: Tensor, weight: Tensor, before: Tensor, has_bias: bool) -> tuple[Tensor, Tensor]:
    """Implement the backward in plain PyTorch; without a bias the sums are an empty tensor."""
    before_grad, sums = gelu_backward_reference(grad @ weight, before, before.new_zeros(before.shape[-1]))
    return before_grad, sums if has_bias else sums.new_empty(0)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    value = x.new_empty((*x.shape[:-1], weight.shape[0]))
    return value, torch.empty_like(value)


def _fake_backward(grad: Tensor, weight: Tensor, before: Tensor, has_bias: bool) -> tuple[Tensor, Tensor]:
    return before.new_empty(before.shape), before.new_empty(before.shape[-1] if has_bias else 0)


define(_NAME, "(Tensor x, Tensor weight, Tensor? bias) -> (Tensor, Tensor)", reference, _fake)
define(
    "gelu_linear_backward",
    "(Tensor grad, Tensor weight, Tensor before, bool has_bias) -> (Tensor, Tensor)",
    backward_reference,
    _fake_backward,
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
    """Return which result of the operators differs from its reference, or an empty string."""

    def numbers(*shape: int) -> Tensor:
        """Return numbers of both signs, without a random number generator, whose state would change."""
        return torch.arange(math.prod(shape), device=device).mul(1.618).sin().view(shape).to(dtype)

    n, o = 24, 128
    x, weight, bias = numbers(n, i), numbers(o, i) / 8, numbers(o) if has_bias else None
    value, before = reference(x, weight, bias)
    after = 1 + numbers(n, i), numbers(i, o) / 8, before, has_bias
    found = *linear_gelu(x, weight, bias), *torch.ops.megalite.gelu_linear_backward(*after)
    names = "GELU", "GELU's input", "its gradient", "the gradient of the bias"
    for name, result, expected in zip(
        names, found, (value, before, *backward_reference(*after)), strict=True
    ):
        error = (result - expected).abs()
        if result.numel() and not bool(error.max() <= _TOLERANCE * expected.abs().max()):
            return f"{name} in {dtype} differs from PyTorch's"
    return ""
