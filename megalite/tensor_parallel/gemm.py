"""The three GEMMs of a linear layer on a rank's slices of its tensors, and its deferred weight gradients.

Weight gradients are outside of autograd: they have an accumulation buffer, and a store of deferred ones.

Shapes: s sequence, b microbatch, in and out features of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megalite.utils import torch_private


class Gemm:
    """GEMMs in the tensors' own dtype. Subclasses round the operands."""

    def rounded_input(self, x: Tensor) -> Tensor:
        """Return the input ``[..., in]`` of a GEMM that sums over `in`."""
        return x

    def rounded_gradient(self, grad: Tensor) -> Tensor:
        """Return the output's gradient ``[..., out]``, for a GEMM that sums over `out`."""
        return grad

    def rounded_weight(self, weight: Tensor, *, sums_over_rows: bool) -> Tensor:
        """Return the weight ``[..., out, in]``, for a GEMM that sums over `out` or over `in`."""
        return weight

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute ``x weight^T + bias``: ``[s, b, in]`` and ``[out, in]`` -> ``[s, b, out]``."""
        # torch selects the kernel by whether the weight requires grad, and the kernels round differently.
        # A detached weight gives the same bits with and without gradients.
        # In 2D, since torch multiplies row by row if a permuted dim of size 1 has another stride.
        rows = self.rounded_input(x).contiguous().flatten(0, -2)
        y = F.linear(rows, self.rounded_weight(weight.detach(), sums_over_rows=False), bias)
        return torch_private.unsafe_view(y, (*x.shape[:-1], y.shape[-1]))

    def scales(self, grad: Tensor, weight: Tensor) -> tuple[Tensor, Tensor] | None:
        """Compute the scales of `input_gradient`'s operands over tp; None if it needs none."""
        return None

    def input_gradient(self, grad: Tensor, weight: Tensor, scales: tuple[Tensor, Tensor] | None) -> Tensor:
        """Compute ``grad weight``: ``[s, b, out]`` and ``[out, in]`` -> ``[s, b, in]``."""
        rows = self.rounded_gradient(grad).flatten(0, -2)
        return (rows @ self.rounded_weight(weight, sums_over_rows=True)).view(*grad.shape[:-1], -1)

    def weight_gradient_operands(self, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``[s b, out]`` and ``[s b, in]`` of ``[s, b, out]`` and ``[s, b, in]``.

        The first, transposed, times the second is the weight's gradient.
        """
        return grad.flatten(0, -2), x.flatten(0, -2)

    def differentiable(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute `forward` on one rank, differentiable by autograd and torch.compile."""
        return F.linear(x, weight.flatten(0, -2), None if bias is None else bias.flatten())


WIDE = Gemm()


class RoundedGemm(Gemm):
    """GEMMs of rounded operands, which autograd cannot differentiate by itself."""

    def differentiable(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute `forward` on one rank, differentiable by autograd and torch.compile."""
        y: Tensor = _Linear.apply(x, weight.flatten(0, -2), None if bias is None else bias.flatten(), self)
        return y


class _Linear(torch.autograd.Function):
    """Linear layer without communication, main_grad or weight-gradient store."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gemm: Gemm) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gemm, ctx.has_bias = gemm, bias is not None
        return gemm.forward(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        left, right = ctx.gemm.weight_gradient_operands(grad, x)
        return (
            ctx.gemm.input_gradient(grad, weight, ctx.gemm.scales(grad, weight)),
            left.t() @ right,
            grad.flatten(0, -2).sum(0) if ctx.has_bias else None,
            None,
        )


class MainGrad(NamedTuple):
    """Access to the buffer that accumulates a weight's gradient. The optimizer sets `weight.main_grad`.

    Attributes:
        claim: returns the buffer, in the weight's shape and in its dtype or a wider one, and whether to
            overwrite it (for the first gradient of an iteration) or to add. The caller must do so at once.
        on_added: call after adding a gradient for which autograd runs no hook.
        fixed_buffer: the buffer, if its memory stays the same during training; else None. With it, a bool in
            host memory: whether a graph of torch.compile adds to it. The first one overwrites it and sets
            the bool.
    """

    claim: Callable[[], tuple[Tensor, bool]]
    on_added: Callable[[], None]
    fixed_buffer: tuple[Tensor, Tensor] | None


def main_grad_of(weight: nn.Parameter) -> MainGrad | None:
    """Return the weight's `main_grad`, or None if autograd accumulates its gradient."""
    return getattr(weight, "main_grad", None)


class WeightGradient(NamedTuple):
    """Weight gradient that is computed later.

    Attributes:
        compute: returns the gradient, or None if it was added to the weight's `main_grad`.
    """

    weight: nn.Parameter
    compute: Callable[[], Tensor | None]


class WeightGradientStore:
    """Weight gradients to compute later in backward: W of zero bubble (Qi et al. 2023, section 2).

    The previous stage only waits for the input's gradient, so a rank computes the weights' gradients while it
    would otherwise be idle.
    """

    def __init__(self) -> None:
        self._stored: list[WeightGradient] | None = None

    def put(self, weight: nn.Parameter, compute: Callable[[], Tensor | None]) -> None:
        """Store a gradient; layers call this in a backward pass inside `collect`."""
        assert self._stored is not None, "a backward pass outside of collect()"
        self._stored.append(WeightGradient(weight, compute))

    @contextmanager
    def collect(self) -> Iterator[list[WeightGradient]]:
        """Collect the gradients that layers store during the backward pass in this block."""
        assert self._stored is None, "collect() blocks do not nest"
        stored: list[WeightGradient] = []
        self._stored = stored
        try:
            yield stored
        finally:
            self._stored = None


def run_stored(gradients: Iterable[WeightGradient]) -> None:
    """Compute and accumulate stored gradients in order.

    Autograd accumulates them and runs the weights' hooks as in an ordinary backward pass.
    """
    for weight, compute in gradients:
        with torch.no_grad():  # the saved input requires grad; the gradient must not
            gradient = compute()
        if gradient is not None:
            torch.autograd.backward(weight, gradient)
