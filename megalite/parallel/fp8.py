"""Linear layers whose products are of 8-bit floating point numbers (Micikevicius et al. 2022).

Output and input gradient are products of fp8 tensors, each scaled so that its largest magnitude, found anew
at each call, becomes the format's largest number. Sums are in fp32, results in the dtype of the input. Over a
tensor-parallel axis the magnitude is that of the whole tensor: slices are rounded as the whole would be, at
the price of an all-reduce of two numbers in each forward and backward pass of a layer.

The weight's gradient stays a product of 16 bits: it goes straight into the fp32 sum of gradients, which
``torch._scaled_mm`` cannot add to, and in 8 bits it would take a transposed copy of both its factors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megalite.errors import UserError
from megalite.parallel.collectives import all_reduce
from megalite.topology import Axis

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GRADIENT_DTYPES = {"hybrid": E5M2, "e4m3": E4M3}
"""By the config's fp8_format; weights and activations are in e4m3 in both."""
_MIN_CAPABILITY = (8, 9)
_SMALLEST = 2.0**-100  # a tensor of zeros has a scale too


class Fp8(NamedTuple):
    """A matrix in 8 bits: its numbers times `unit` are those meant."""

    numbers: Tensor
    unit: Tensor


def amax(x: Tensor) -> Tensor:
    """The largest magnitude in a tensor, a scalar in fp32; NaN where there is one."""
    return x.detach().abs().amax().float()


def in_fp8(x: Tensor, dtype: torch.dtype, largest: Tensor) -> Fp8:
    """Rounds a matrix to 8 bits.

    What is not finite in `x` is not so in the result either, nor in what is made of it.

    Args:
        largest: no magnitude in `x` is above it.
    """
    top = torch.finfo(dtype).max
    unit = largest.clamp_min(_SMALLEST) / top
    return Fp8((x.float() / unit).clamp(-top, top).to(dtype).contiguous(), unit)


def scaled_product(a: Fp8, b: Fp8, bias: Tensor | None, dtype: torch.dtype, *, is_fast: bool) -> Tensor:
    """``[n, k]`` and ``[m, k]`` -> ``a b^T + bias``, ``[n, m]``.

    Args:
        is_fast: Hopper may keep fewer bits of the sums, which a gradient's would miss.
    """
    return torch._scaled_mm(
        a.numbers,
        b.numbers.t(),  # column by column, as it wants its second factor
        scale_a=a.unit,
        scale_b=b.unit,
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=is_fast,
    )


class Fp8Gemm:
    """The GEMMs of a linear layer in 8 bits; see `linear.Gemm`."""

    def __init__(self, fp8_format: str, tp: Axis) -> None:
        """Takes a key of `GRADIENT_DTYPES`, and the axis that the layers' tensors are cut over."""
        self.gradient_dtype = GRADIENT_DTYPES[fp8_format]
        self.tp = tp

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``[s, b, in]`` and ``[out, in]`` -> ``x weight^T + bias``, ``[s, b, out]``."""
        rows, weight = x.detach().flatten(0, -2), weight.detach()
        of_x, of_weight = self._largest(rows, weight)
        factors = in_fp8(rows, E4M3, of_x), in_fp8(weight, E4M3, of_weight)
        y = scaled_product(*factors, None if bias is None else bias.detach(), x.dtype, is_fast=True)
        return _with_rows_of(x, y)

    def scales(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Return the largest magnitudes of both over the ranks of tp, ``[2]``."""
        return self._largest(grad, weight)

    def input_gradient(self, grad: Tensor, weight: Tensor, scales: Tensor | None) -> Tensor:
        """``[s, b, out]`` and ``[out, in]`` -> ``grad weight``, ``[s, b, in]``, by the result of `scales`."""
        assert scales is not None
        of_grad, of_weight = scales
        rows = grad.flatten(0, -2)
        factors = in_fp8(rows, self.gradient_dtype, of_grad), in_fp8(weight.t(), E4M3, of_weight)
        return _with_rows_of(grad, scaled_product(*factors, None, grad.dtype, is_fast=False))

    def traced(self, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> Tensor:
        """As `forward`, differentiable by autograd and by torch.compile, for one rank."""
        y: Tensor = _Traced.apply(x, weight.flatten(0, -2), None if bias is None else bias.flatten(), self)
        return y

    def _largest(self, *tensors: Tensor) -> Tensor:
        """The largest magnitude of each in the whole tensor, of which this rank may have a slice."""
        return all_reduce(torch.stack([amax(x) for x in tensors]), self.tp, dist.ReduceOp.MAX)


def _with_rows_of(x: Tensor, y: Tensor) -> Tensor:
    """``[s, b, i]`` and ``[s b, o]`` -> ``[s, b, o]``; no view, as ranks sum it in place."""
    return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[-1]))


class _Traced(torch.autograd.Function):
    """The product without communication, and with no sum that gradients are to be added to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gemm: Fp8Gemm) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gemm, ctx.has_bias = gemm, bias is not None
        return gemm.forward(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        return (
            ctx.gemm.input_gradient(grad, weight, ctx.gemm.scales(grad, weight)),
            rows.t() @ x.flatten(0, -2),
            rows.sum(0) if ctx.has_bias else None,
            None,
        )


def check_device(device: torch.device, fp8_format: str) -> None:
    """Makes sure that a device multiplies in 8 bits.

    Raises:
        UserError: it does not.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= _MIN_CAPABILITY:
        return
    what = torch.cuda.get_device_name(device) if device.type == "cuda" else f"this run is on {device.type}"
    raise UserError(
        f"--fp8-format {fp8_format}: products in 8 bits need a GPU of compute capability 8.9 or later (Ada, "
        f"Hopper, Blackwell), and {what}: leave it out"
    )
