"""Call operators from compiled layers, with the key in a tensor, so that one graph serves all layers.

An integer would be a constant of the compiled graph, but the dropout of each layer has a different key. In a
tensor on the host, the key is an input of the graph, and reading it does not synchronize with the GPU.
"""

from typing import Any

import torch
from torch import Tensor

from megalite.kernels.library import NAMESPACE
from megalite.kernels.philox import signed64

_OP = f"{NAMESPACE}::bias_dropout_add_by_tensor"
_BACKWARD = f"{NAMESPACE}::bias_dropout_add_by_tensor_backward"

torch.library.define(
    _OP,
    "(Tensor x, Tensor? bias, Tensor residual, Tensor sample_numbers, Tensor key, float p, int base) "
    "-> Tensor",
)
torch.library.define(
    _BACKWARD, "(Tensor grad, Tensor sample_numbers, Tensor key, float p, int base) -> (Tensor, Tensor)"
)


def key_tensor(key: int) -> Tensor:
    """Return the 64 bits of a key as a scalar on the host."""
    return torch.tensor(signed64(key), dtype=torch.int64, device="cpu")


def key_of(tensor: Tensor) -> int:
    """Return the key that `key_tensor` was called with."""
    return int(tensor) % (1 << 64)


def traced_bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    p: float,
    key: Tensor,
    sample_numbers: Tensor,
    *,
    base: int = 0,
) -> Tensor:
    """Compute the same as `bias_dropout_add`, with the same bits.

    Without dropout it uses PyTorch operators, which the compiler fuses with their neighbours, computes in
    fp32 and rounds once. An explicit cast here would add a pass in backward.

    Args:
        key: from `key_tensor`.
    """
    if p == 0.0:
        return residual + (x if bias is None else x + bias)
    result: Tensor = torch.ops.megalite.bias_dropout_add_by_tensor(
        x, bias, residual, sample_numbers, key, p, base
    )
    return result


def _forward(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    sample_numbers: Tensor,
    key: Tensor,
    p: float,
    base: int,
) -> Tensor:
    result: Tensor = torch.ops.megalite.bias_dropout_add(x, bias, residual, sample_numbers, p, int(key), base)
    return result


def _gradients(
    grad: Tensor, sample_numbers: Tensor, key: Tensor, p: float, base: int
) -> tuple[Tensor, Tensor]:
    x_grad, bias_grad = torch.ops.megalite.bias_dropout_add_backward(grad, sample_numbers, p, int(key), base)
    return x_grad, bias_grad


torch.library.register_kernel(_OP, None, _forward)
torch.library.register_kernel(_BACKWARD, None, _gradients)


@torch.library.register_fake(_OP)
def _fake(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    sample_numbers: Tensor,
    key: Tensor,
    p: float,
    base: int,
) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake(_BACKWARD)
def _fake_gradients(
    grad: Tensor, sample_numbers: Tensor, key: Tensor, p: float, base: int
) -> tuple[Tensor, Tensor]:
    return grad.new_empty(grad.shape), grad.new_empty(grad.shape[-1:])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, bias, _, sample_numbers, key, *ctx.site = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(sample_numbers, key)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x_grad, bias_grad = torch.ops.megalite.bias_dropout_add_by_tensor_backward(
        grad.contiguous(), *ctx.saved_tensors, *ctx.site
    )
    return x_grad, bias_grad if ctx.has_bias else None, grad, None, None, None, None


torch.library.register_autograd(_OP, _backward, setup_context=_setup_context)
