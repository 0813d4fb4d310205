"""GEMMs of linear layers in 8-bit floating point (Micikevicius et al. 2022).

The output and the input's gradient are computed from fp8 operands. Each operand is scaled so that its largest
magnitude, measured at each call, becomes the format's largest number. Sums are in fp32, results in the dtype
of the input. With tensor parallelism the magnitude is measured over the full tensor, so that slices are
rounded like the full tensor; this takes an all-reduce of two numbers in each forward and backward of a layer.

The weight's gradient is computed in 16 bits: ``torch._scaled_mm`` cannot add it to the fp32 gradient buffer,
and fp8 would need a transposed copy of both operands.

Weights only change between iterations. `Fp8Weights` keeps their magnitudes and 8-bit copies for the GEMMs of
an iteration, in row order for forward and transposed for backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite.distributed.axis import Axis
from megalite.distributed.collectives import all_reduce
from megalite.kernels.library import at_run_time
from megalite.utils.errors import UserError
from megalite.utils.torch_private import scaled_mm, storage_number, unsafe_view

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GRADIENT_DTYPES = {"hybrid": E5M2, "e4m3": E4M3}
"""Dtype of gradients by the config's fp8_format; weights and activations are always in e4m3."""
_MIN_CAPABILITY = (8, 9)
_SMALLEST = 2.0**-100  # so that the scale of a tensor of zeros is not 0


class Fp8(NamedTuple):
    """Matrix in 8 bits: its values are ``numbers * scale``."""

    numbers: Tensor
    scale: Tensor


@at_run_time
def amax(x: Tensor) -> Tensor:
    """Return the largest magnitude in a tensor, an fp32 scalar; NaN if the tensor contains NaN."""
    return x.detach().abs().amax().float()


@at_run_time
def _rounded(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x * factor`` in 8 bits, contiguous, in one pass over `x` on a GPU."""
    top = torch.finfo(dtype).max
    return (x.float() * factor).clamp(-top, top).to(dtype).contiguous()


def in_fp8(x: Tensor, dtype: torch.dtype, largest: Tensor) -> Fp8:
    """Round a matrix to 8 bits. Infinities and NaNs stay visible in the result and in GEMMs with it.

    Args:
        largest: upper bound of the magnitudes in `x`.
    """
    scale = largest.clamp_min(_SMALLEST) / torch.finfo(dtype).max
    # Multiply: a compiler may round a division of each element differently.
    return Fp8(_rounded(x, scale.reciprocal(), dtype), scale)


def scaled_gemm(a: Fp8, b: Fp8, bias: Tensor | None, dtype: torch.dtype, *, is_fast: bool) -> Tensor:
    """Compute ``a b^T + bias``: ``[n, k]`` and ``[m, k]`` -> ``[n, m]``.

    Args:
        is_fast: let Hopper GPUs accumulate with fewer bits, which are too few for gradients.
    """
    return scaled_mm(
        a.numbers,
        b.numbers.t(),  # scaled_mm requires a column-major second operand
        scale_a=a.scale,
        scale_b=b.scale,
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=is_fast,
    )


@dataclass
class Fp8Weight:
    """Properties of a weight ``[out, in]``.

    Attributes:
        weight: the weight. While this object holds it, no other weight is at its place in memory.
        largest: largest magnitude over the ranks of tp; None if it has not been measured.
        copies: copies in 8 bits, by whether they are transposed.
    """

    weight: Tensor
    largest: Tensor | None = None
    copies: dict[bool, Fp8] = field(default_factory=dict)


class Fp8Weights:
    """Magnitudes and 8-bit copies of a rank's weights during an iteration.

    Outside of `iteration`, where weights may change at any time, nothing is kept. A graph of torch.compile
    does not keep anything either.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], Fp8Weight] | None = None
        self._keeps_copies = False

    @contextmanager
    def iteration(self, *, keeps_copies: bool) -> Iterator[None]:
        """Keep what GEMMs in this block compute from weights, which do not change in it.

        Args:
            keeps_copies: keep the copies, 2 bytes per weight, and not only the magnitudes.
        """
        self._known, self._keeps_copies = {}, keeps_copies
        try:
            yield
        finally:
            self._known = None

    def of(self, weight: Tensor) -> Fp8Weight:
        """Return what is known of a weight; of a new one, nothing."""
        if torch.compiler.is_compiling() or self._known is None:
            return Fp8Weight(weight)
        place = storage_number(weight.untyped_storage()), int(weight.storage_offset())
        return self._known.setdefault(place, Fp8Weight(weight))

    def copy_of(self, weight: Tensor, largest: Tensor, *, is_transposed: bool) -> Fp8:
        """Return a weight in 8 bits, rounded now unless a copy was kept."""
        copies = self.of(weight).copies
        if is_transposed in copies:
            return copies[is_transposed]
        copy = in_fp8(weight.t() if is_transposed else weight, E4M3, largest)
        if self._keeps_copies:
            copies[is_transposed] = copy
        return copy


class Fp8Gemm:
    """GEMMs of a linear layer in 8 bits; see `linear.Gemm`.

    Args:
        fp8_format: a key of `GRADIENT_DTYPES`.
        tp: the axis that the layers' tensors are sharded along.
        weights: holds the weights in 8 bits during an iteration; None to round them in each GEMM.
    """

    def __init__(self, fp8_format: str, tp: Axis, weights: Fp8Weights | None = None) -> None:
        self.gradient_dtype = GRADIENT_DTYPES[fp8_format]
        self.tp = tp
        self.weights = weights or Fp8Weights()

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute ``x weight^T + bias``: ``[s, b, in]`` and ``[out, in]`` -> ``[s, b, out]``."""
        rows, weight = x.detach().flatten(0, -2), weight.detach()
        largest_x, largest_weight = self.scales(rows, weight)
        weight_in_fp8 = self.weights.copy_of(weight, largest_weight, is_transposed=False)
        own_bias = None if bias is None else bias.detach()
        y = scaled_gemm(in_fp8(rows, E4M3, largest_x), weight_in_fp8, own_bias, x.dtype, is_fast=True)
        return _with_rows_of(x, y)

    def scales(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest magnitudes of an operand and a weight over tp, whose ranks may hold slices."""
        known = self.weights.of(weight)
        if known.largest is not None:
            (largest_x,) = self._largest(x)
            return largest_x, known.largest
        largest_x, known.largest = self._largest(x, weight)
        return largest_x, known.largest

    def input_gradient(self, grad: Tensor, weight: Tensor, scales: tuple[Tensor, Tensor] | None) -> Tensor:
        """Compute ``grad weight``: ``[s, b, out]`` and ``[out, in]`` -> ``[s, b, in]``.

        Args:
            scales: result of `scales` for these tensors.
        """
        assert scales is not None
        largest_grad, largest_weight = scales
        grad_in_fp8 = in_fp8(grad.flatten(0, -2), self.gradient_dtype, largest_grad)
        weight_in_fp8 = self.weights.copy_of(weight, largest_weight, is_transposed=True)
        return _with_rows_of(grad, scaled_gemm(grad_in_fp8, weight_in_fp8, None, grad.dtype, is_fast=False))

    def differentiable(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute `forward` on one rank, differentiable by autograd and torch.compile."""
        y: Tensor = _Traced.apply(x, weight.flatten(0, -2), None if bias is None else bias.flatten(), self)
        return y

    def _largest(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return all_reduce(torch.stack([amax(x) for x in tensors]), self.tp, dist.ReduceOp.MAX).unbind()


def _with_rows_of(x: Tensor, y: Tensor) -> Tensor:
    """Reshape `y` ``[s b, out]`` to ``[s, b, out]``, by the shape of `x` ``[s, b, in]``."""
    # Return a tensor that is not a view: the ranks sum it in place.
    return unsafe_view(y, (*x.shape[:-1], y.shape[-1]))


class _Traced(torch.autograd.Function):
    """Linear layer without communication, main_grad or weight-gradient store."""

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
    """Check that a device has GEMMs in 8 bits.

    Raises:
        UserError: the device has none.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= _MIN_CAPABILITY:
        return
    what = torch.cuda.get_device_name(device) if device.type == "cuda" else f"this run is on {device.type}"
    raise UserError(
        f"--fp8-format {fp8_format}: GEMMs in 8 bits need a GPU of compute capability 8.9 or later (Ada, "
        f"Hopper, Blackwell), and {what}: remove the flag"
    )
