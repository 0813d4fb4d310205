"""GEMMs of linear layers whose operands are rounded to 8 or 4 bits, with a scale for each block of elements.

    recipe       blocks of activations and gradients    blocks of weights
    blockwise    128 elements                           128 x 128 elements    DeepSeek-V3, section 3.3
    mxfp8        32 elements                            32 elements           OCP Microscaling 1.0
    nvfp4        16 elements                            16 x 16 elements      NVIDIA 2025, arXiv 2509.25149

A block of one dimension lies along the features or tokens that a GEMM sums over, so an operand of two GEMMs
is rounded twice. A scale of 8-bit numbers is the smallest power of two with which no element is too large for
the format, as in Transformer Engine. Scales of 4-bit numbers are in `round_to_e2m1`.

A rounded operand is kept in the dtype of the model, which represents each code times its scale exactly. A
GEMM in that dtype is then the GEMM in 8 bits up to the order of its sums, on any device, but not faster.

Blocks do not depend on the layout: a rule lets no cut of features or tokens pass through one, and the tokens
of a block are of one sample. So every layout and every micro-batch size rounds to the same codes.

Shapes: s sequence, b microbatch, in and out features of a layer.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from megalite.config.training import FP8_BLOCKS
from megalite.kernels.library import like_first, one_operator
from megalite.tensor_parallel.fp8 import DTYPES, E2M1, Fp8Settings
from megalite.tensor_parallel.gemm import RoundedGemm

_SMALLEST_EXPONENT = -127  # of a scale in 8 bits of exponent
_SMALLEST_E2M1_SCALE = 2.0**-100  # so that the scale of a block of zeros is not 0


@one_operator(
    "(Tensor x, ScalarType dtype, int rows, int columns, Tensor? uniform=None) -> Tensor", like_first
)
def round_in_blocks(
    x: Tensor, dtype: torch.dtype, rows: int, columns: int, uniform: Tensor | None = None
) -> Tensor:
    """Round each block of ``[..., n, k]`` to 8 or 4 bits; return what the codes mean, in the dtype of `x`.

    The last blocks of a dim have fewer elements if the size of a block does not divide it. A block with an
    infinity or NaN becomes NaN, as with the scale of Microscaling.

    Args:
        rows, columns: size of a block along the last two dims.
        uniform: see `round_to_e2m1`.
    """
    n, k = x.shape[-2:]
    if n % rows or k % columns:
        x = F.pad(x, (0, -k % columns, 0, -n % rows))
    blocks = x.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))  # [..., n/r, r, k/c, c]
    largest = blocks.abs().amax(-1, keepdim=True).amax(-3, keepdim=True)
    if dtype == E2M1:
        rounded = round_to_e2m1(blocks, largest, uniform)
    else:
        exponents, one = scale_exponents(largest, dtype), torch.ones_like(largest)
        scale = torch.ldexp(one, exponents).where(largest.isfinite(), torch.nan)
        codes = (blocks * torch.ldexp(one, -exponents)).to(dtype)
        rounded = _decoded(codes, x.dtype) * scale
    return rounded.flatten(-2).flatten(-3, -2)[..., :n, :k]


def round_to_e2m1(blocks: Tensor, largest: Tensor, uniform: Tensor | None) -> Tensor:
    """Round blocks to multiples of 0, 0.5, 1, 1.5, 2, 3, 4 and 6, the magnitudes of E2M1.

    The scale of a block is its largest magnitude over 6, rounded to the 3 bits of E4M3's mantissa. On a GPU
    it is an E4M3 number times a power of two of the tensor. As long as that number is a normal one, the power
    of two does not matter, and none is needed here. An element beyond 6 scales becomes 6 scales.

    Args:
        largest: the largest magnitudes of the blocks, of size 1 where these have more elements.
        uniform: numbers between 0 and 1, as many as there are elements: round up if the distance from the
            number below, as a part of the distance of neighbours, plus this number is above 1. None to round
            to the nearest, ties to even codes.
    """
    wide = torch.promote_types(blocks.dtype, torch.float32)
    mantissa, exponent = torch.frexp((largest.to(wide) / 6.0).clamp_min(_SMALLEST_E2M1_SCALE))
    scale = torch.ldexp((mantissa * 16.0).round() / 16.0, exponent).where(largest.isfinite(), torch.nan)
    scaled = (blocks.to(wide) / scale).clamp(-6.0, 6.0)
    magnitude = scaled.abs()
    step = torch.where(magnitude < 2.0, 0.5, torch.where(magnitude < 4.0, 1.0, 2.0)).to(wide)
    scaled /= step
    codes = scaled.round() if uniform is None else (scaled + uniform.view_as(scaled)).floor()
    return (codes * step * scale).to(blocks.dtype)


def _decoded(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert 8-bit numbers to a wider dtype: with a table, since torch converts them one by one on a CPU."""
    table = torch.arange(256, dtype=torch.uint8, device=codes.device).view(codes.dtype).to(dtype)
    return table.index_select(0, codes.view(torch.uint8).flatten().int()).view(codes.shape)


def scale_exponents(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the exponents of the smallest powers of two that bring magnitudes into the range of a dtype."""
    # largest / top = (mantissa / top's mantissa) 2^(exponent - top's exponent), without a rounded division
    top_mantissa, top_exponent = torch.frexp(torch.tensor(torch.finfo(dtype).max))
    mantissa, exponent = torch.frexp(largest.to(torch.promote_types(largest.dtype, torch.float32)))
    return (exponent - int(top_exponent) + (mantissa > float(top_mantissa))).clamp_min(_SMALLEST_EXPONENT)


class BlockGemm(RoundedGemm):
    """GEMMs whose operands are rounded in blocks."""

    def __init__(self, settings: Fp8Settings) -> None:
        self.blocks = FP8_BLOCKS[settings.recipe]
        self.dtype, self.gradient_dtype = DTYPES[settings.fp8_format]
        self.weights = settings.weights
        self.rounds_weight_gradients = settings.rounds_weight_gradients

    def rounded_input(self, x: Tensor) -> Tensor:
        """Round blocks along the features of ``[..., in]``."""
        return round_in_blocks(x, self.dtype, 1, self.blocks.size)

    def rounded_gradient(self, grad: Tensor) -> Tensor:
        """Round blocks along the features of ``[..., out]``."""
        return round_in_blocks(grad, self.gradient_dtype, 1, self.blocks.size)

    def rounded_weight(self, weight: Tensor, *, sums_over_rows: bool) -> Tensor:
        """Round blocks of ``[..., out, in]``."""
        size, rows = self.blocks
        transposes = sums_over_rows and size != rows  # square blocks are the same for both GEMMs

        def compute() -> Tensor:
            rounded = round_in_blocks(weight.mT if transposes else weight, self.dtype, rows, size)
            return rounded.mT if transposes else rounded

        return self.weights.keep(weight, transposes, compute)

    def weight_gradient_operands(self, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Round ``[s, b, out]`` and ``[s, b, in]`` in blocks of the tokens of each sample."""
        if not self.rounds_weight_gradients:
            return super().weight_gradient_operands(grad, x)
        size = self.blocks.size
        left = round_in_blocks(grad.flatten(1), self.gradient_dtype, size, 1).view(grad.shape)
        right = round_in_blocks(x.flatten(1), self.dtype, size, 1).view(x.shape)
        return super().weight_gradient_operands(left, right)
