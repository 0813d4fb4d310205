"""GEMMs in 8 bits with scales from earlier iterations, as Transformer Engine's recipe `DelayedScaling`.

An operand is rounded with a known scale, so a GPU reads it once, and no rank waits for another. Its largest
magnitude is measured in the same pass. After an update, the magnitudes of all microbatches and ranks join the
history, and set the scales of the next iteration:

    scale = 2^margin * (the largest or the last magnitude in the history) / (the format's largest number)

This is the inverse of the scale in `transformer_engine.pytorch.fp8`. Numbers beyond the range become the
format's largest. If the magnitude is zero or not finite, the scale stays.

Two things differ from Transformer Engine. The history advances once per iteration, and not per microbatch, so
that it depends neither on the layout nor on the micro-batch size. Before the first update there is no
history, and GEMMs are in the dtype of the model. Transformer Engine starts with a scale of 1, which rounds
small gradients to zero.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.distributed.axis import Axis
from megalite.distributed.collectives import all_reduce
from megalite.distributed.topology import Topology
from megalite.kernels.library import at_run_time, one_operator
from megalite.tensor_parallel.fp8 import (
    DTYPES,
    E4M3,
    Fp8,
    Fp8Settings,
    WeightPart,
    amax,
    emulated_gemm,
    in_fp8,
    round_tensor,
    scale_of,
    scaled_gemm,
    visible_amax,
    with_rows_of,
)
from megalite.tensor_parallel.gemm import WIDE, RoundedGemm

_INPUT, _WEIGHT, _GRADIENT = range(3)
"""Columns of a history: the operands of a linear layer."""


@one_operator(
    "(Tensor x, Tensor largest, Tensor measured, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    lambda x, largest, measured, dtype: (
        x.new_empty(x.shape, dtype=dtype),
        torch.empty_like(largest),
        torch.empty_like(measured),
    ),
)
@at_run_time
def round_and_measure(
    x: Tensor, largest: Tensor, measured: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Round a tensor to 8 bits with a known scale, in one pass over `x` on a GPU.

    Args:
        largest: magnitude that becomes the largest number of `dtype`.
        measured: largest magnitude of other tensors.

    Returns:
        The 8-bit numbers, their scale, and the largest magnitude of `x` and the other tensors. The scale is
        NaN if `x` contains an infinity, which would otherwise become a number, or NaN.
    """
    own, scale = x.detach().abs().amax().float(), scale_of(largest, dtype)
    numbers = round_tensor(x, scale.reciprocal(), dtype)
    return numbers, scale + (own - own), torch.maximum(measured, own)


class DelayedGemm(RoundedGemm):
    """GEMMs of a linear layer in 8 bits, with scales from earlier iterations.

    Attributes:
        history: fp32 ``[1 + length, 3]`` of input, weight and gradient: the magnitudes that set the scales,
            then the largest magnitudes of the last iterations, the newest first. Zeros before the first
            update. `ScaleHistory` gives it memory.
        measured: fp32 scalars, the largest magnitudes of this rank since the iteration began.
    """

    def __init__(self, settings: Fp8Settings) -> None:
        _, self.gradient_dtype = DTYPES[settings.fp8_format]
        self.weights = settings.weights
        self.multiply = emulated_gemm if settings.emulates else scaled_gemm
        self.history = torch.empty(1 + settings.history_length, 3, device="meta")
        self.measured = self.history[0].unbind()
        self._range = 2.0**settings.margin
        self._has_history = False
        self.scale_axes: tuple[Axis, ...] = ()  # the history is of all ranks

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute ``x weight^T + bias``: ``[s, b, in]`` and ``[out, in]`` -> ``[s, b, out]``."""
        weight = weight.detach()
        if not self.has_history:
            self._measure(x, _INPUT)
            self._measure(weight, _WEIGHT)
            return WIDE.forward(x, weight, bias)
        rows, own_bias = x.detach().flatten(0, -2), None if bias is None else bias.detach()
        rounded = self._rounded_weight(weight)
        y = self.multiply(self._rounded(rows, _INPUT, E4M3), rounded, own_bias, x.dtype, is_fast=True)
        return with_rows_of(x, y)

    def input_gradient(self, grad: Tensor, weight: Tensor, scales: object) -> Tensor:
        """Compute ``grad weight``: ``[s, b, out]`` and ``[out, in]`` -> ``[s, b, in]``."""
        if not self.has_history:
            self._measure(grad, _GRADIENT)
            return WIDE.input_gradient(grad, weight, None)
        gathered = self.weights.of(weight).gathered

        def transposed() -> Fp8:
            if gathered is not None:
                return Fp8(gathered.numbers, gathered.scale[0]).transposed()
            return in_fp8(weight.t(), E4M3, self._largest_of(_WEIGHT))

        rounded = self.weights.keep(weight, True, transposed)
        left = self._rounded(grad.flatten(0, -2), _GRADIENT, self.gradient_dtype)
        return with_rows_of(grad, self.multiply(left, rounded, None, grad.dtype, is_fast=False))

    @property
    def rounds(self) -> bool:
        """Return whether scales are known."""
        return self.has_history

    def scale_shape(self, shape: torch.Size) -> tuple[int, ...]:
        """Return the shape of a scale and the largest magnitude."""
        return (2,)

    def scale_of_part(self, part: WeightPart) -> Tensor:
        """Return the scale, infinity if the part is not finite, and the largest magnitude of the part."""
        own = visible_amax(part.elements)
        scale = scale_of(self._largest_of(_WEIGHT), E4M3)
        return torch.stack((scale.where(own.isfinite(), torch.inf), own))

    def round_part(self, part: WeightPart, scale: Tensor) -> Tensor:
        """Return the elements of a part in E4M3."""
        return round_tensor(part.elements, scale[0].reciprocal(), E4M3)

    def _rounded_weight(self, weight: Tensor) -> Fp8:
        """Return a weight in 8 bits, and measure it."""
        gathered = self.weights.of(weight).gathered
        if gathered is None:
            return self.weights.keep(weight, False, lambda: self._rounded(weight, _WEIGHT, E4M3))
        scale, largest = gathered.scale.unbind()
        torch.maximum(self.measured[_WEIGHT], largest, out=self.measured[_WEIGHT])
        return Fp8(gathered.numbers, scale)

    @property
    def has_history(self) -> bool:
        """Return whether scales are known; until then, read it from the device."""
        if not self._has_history:
            self._has_history = self.history.is_meta or bool(self.history[0, _INPUT] > 0)
        return self._has_history

    def _largest_of(self, operand: int) -> Tensor:
        """Return the magnitude that becomes the format's largest number."""
        return self.history[0, operand] * self._range

    def _rounded(self, x: Tensor, operand: int, dtype: torch.dtype) -> Fp8:
        measured = self.measured[operand]
        numbers, scale, largest = round_and_measure(x, self._largest_of(operand), measured, dtype)
        measured.copy_(largest)
        return Fp8(numbers, scale)

    def _measure(self, x: Tensor, operand: int) -> None:
        measured = self.measured[operand]
        torch.maximum(measured, amax(x), out=measured)


class ScaleHistory:
    """Update of the scales of a rank's linear layers, after the optimizer's.

    Args:
        uses_newest: scales follow from the last iteration, and not from the largest of the history.
    """

    def __init__(
        self, topology: Topology, layers: Mapping[nn.Module, DelayedGemm], *, uses_newest: bool
    ) -> None:
        self.axes = [axis for name, axis in topology.axes.items() if name != "pp"]
        self.uses_newest = uses_newest
        gemms = list(layers.values())
        shape = len(gemms), *gemms[0].history.shape
        self.histories = torch.zeros(shape, device=topology.device)  # [layers, 1 + length, 3]
        self.measured = torch.zeros_like(self.histories[:, 0])  # [layers, 3]
        formats = E4M3, E4M3, gemms[0].gradient_dtype
        self.tops = self.measured.new_tensor([torch.finfo(dtype).max for dtype in formats])
        for layer, gemm, *views in zip(layers, gemms, self.histories, self.measured, strict=True):
            gemm.history, gemm.measured = views[0], views[1].unbind()
            layer.register_buffer("amax_history", gemm.history)  # in checkpoints

    def begin(self) -> None:
        """Forget the magnitudes of the last iteration."""
        self.measured.zero_()

    @torch.no_grad()
    def step(self, is_good: Tensor) -> None:
        """Advance the history and set the scales; all ranks that hold the same layers must call it."""
        for axis in self.axes:
            all_reduce(self.measured, axis, dist.ReduceOp.MAX, of="largest magnitudes")
        last, known = self.histories[:, :1], self.histories[:, 1:-1]
        history = torch.cat((self.measured[:, None], known), 1)
        used = self.measured[:, None] if self.uses_newest else history.amax(1, keepdim=True)
        used = torch.where((used > 0) & used.isfinite(), used, last)
        used = torch.where(used > 0, used, self.tops)  # a scale of 1
        updated = torch.cat((used, history), 1)
        self.histories.copy_(torch.where(is_good, updated, self.histories))
