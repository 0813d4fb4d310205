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

GEMMs of `Nvfp4Gemm` (arXiv 2509.25149, section 4):

    GEMM               operand                 blocks     before rounding        rounding
    output             input                   1 x 16                            to nearest
                       weight                  16 x 16                           to nearest
    input gradient     gradient                1 x 16                            at random
                       weight                  16 x 16                           to nearest
    weight gradient    gradient, transposed    1 x 16     Hadamard transform     at random
                       input, transposed       1 x 16     Hadamard transform     to nearest

Rounding at random gives the upper neighbour with a probability equal to the distance from the lower one, so
that its mean is the number itself. The transform multiplies 16 consecutive tokens of a sample by an
orthogonal matrix, which spreads outliers over them and cancels in the GEMM.

A random number is a function of the seed, the layer's name, the sample's number in the run, the token's
position and the output feature, like a dropout mask. Every layout and every micro-batch size rounds alike.

Shapes: s sequence, b microbatch, in and out features of a layer, f one of them, g = s/16 groups of tokens.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megalite.config.training import FP8_BLOCKS
from megalite.distributed.axis import Axis, HeldPositions, range_positions
from megalite.distributed.topology import Topology
from megalite.kernels import site_key
from megalite.kernels.library import like_first, one_operator
from megalite.kernels.philox import random_words
from megalite.tensor_parallel.fp8 import DTYPES, E2M1, Fp8, Fp8Settings, WeightPart
from megalite.tensor_parallel.gemm import RoundedGemm
from megalite.tensor_parallel.parameter_spec import spec_of
from megalite.tensor_parallel.placement import Box

_SIZE = 16
"""Elements of a block in 4 bits, and of a vector that is transformed."""
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
    blocks = _in_blocks(x, rows, columns)
    largest = _largest_in(blocks)
    if dtype == E2M1:
        rounded = round_to_e2m1(blocks, largest, uniform)
    else:
        exponents, one = scale_exponents(largest, dtype), torch.ones_like(largest)
        scale = torch.ldexp(one, exponents).where(largest.isfinite(), torch.nan)
        codes = (blocks * torch.ldexp(one, -exponents)).to(dtype)
        rounded = _decoded(codes, x.dtype) * scale
    return _joined(rounded)[..., :n, :k]


def _in_blocks(x: Tensor, rows: int, columns: int) -> Tensor:
    """Split ``[..., n, k]`` into blocks, ``[..., n/r, r, k/c, c]``, the last ones with zeros."""
    n, k = x.shape[-2:]
    if n % rows or k % columns:
        x = F.pad(x, (0, -k % columns, 0, -n % rows))
    return x.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))


def _joined(blocks: Tensor) -> Tensor:
    """Join blocks ``[..., n/r, r, k/c, c]`` to ``[..., n, k]``."""
    return blocks.flatten(-2).flatten(-3, -2)


def _largest_in(blocks: Tensor) -> Tensor:
    """Return the largest magnitude of each block, ``[..., n/r, 1, k/c, 1]``."""
    return blocks.abs().amax(-1, keepdim=True).amax(-3, keepdim=True)


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

    rounds = True

    def __init__(self, settings: Fp8Settings) -> None:
        self.blocks = FP8_BLOCKS[settings.recipe]
        self.dtype, self.gradient_dtype = DTYPES[settings.fp8_format]
        self.weights = settings.weights
        self.rounds_weight_gradients = settings.rounds_weight_gradients
        self.scale_axes: tuple[Axis, ...] = ()  # tp cuts no block

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
            if (gathered := self.weights.of(weight).gathered) is not None:
                return self._decode(gathered, weight.dtype)
            rounded = round_in_blocks(weight.mT if transposes else weight, self.dtype, rows, size)
            return rounded.mT if transposes else rounded

        return self.weights.keep(weight, transposes, compute)

    def scale_shape(self, shape: torch.Size) -> tuple[int, ...]:
        """Return the numbers of rows and columns of blocks."""
        size, rows = self.blocks
        return -(-math.prod(shape[:-1]) // rows), -(-shape[-1] // size)

    def scale_of_part(self, part: WeightPart) -> Tensor:
        """Return the scales that the part of each block needs; 0 for zeros, infinity for one and for NaN."""
        blocks, own, _ = self._blocks_of(part)
        largest = _largest_in(blocks)[:, 0, :, 0]
        scale = torch.zeros(self.scale_shape(part.shape), device=largest.device)
        powers = torch.ldexp(torch.ones_like(scale[own]), scale_exponents(largest, self.dtype))
        # The least power of two would be too much for a block whose other parts are smaller still.
        scale[own] = powers.where(largest != 0, 0.0).where(largest.isfinite(), torch.inf)
        return scale

    def round_part(self, part: WeightPart, scale: Tensor) -> Tensor:
        """Return the elements of a part in E4M3, with the scales of the weight's blocks."""
        blocks, own, before = self._blocks_of(part)
        own_scale = scale[own, None, :, None]
        factors = own_scale.where(own_scale != 0, 1.0).reciprocal().to(blocks.dtype)  # 0 of a block of zeros
        codes = _joined((blocks * factors).to(self.dtype))[:, : part.shape[-1]]
        return codes.flatten()[before : before + len(part.elements)]

    def _blocks_of(self, part: WeightPart) -> tuple[Tensor, slice, int]:
        """Return the rows of blocks that have a part, these rows' numbers, and the elements before the part.

        Elements of other parts are zeros.
        """
        size, rows = self.blocks
        first, before = divmod(part.start, height := rows * part.shape[-1])
        whole = F.pad(part.elements, (before, -(before + len(part.elements)) % height))
        blocks = _in_blocks(whole.view(-1, part.shape[-1]), rows, size)
        return blocks, slice(first, first + len(blocks)), before

    def _decode(self, gathered: Fp8, dtype: torch.dtype) -> Tensor:
        """Return what the codes of a weight ``[out, in]`` mean."""
        size, rows = self.blocks
        n, k = gathered.numbers.shape
        scale = gathered.scale.where(gathered.scale.isfinite(), torch.nan).to(dtype)[:, None, :, None]
        return _joined(_in_blocks(_decoded(gathered.numbers, dtype), rows, size) * scale)[:n, :k]

    def weight_gradient_operands(self, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Round ``[s, b, out]`` and ``[s, b, in]`` in blocks of the tokens of each sample."""
        if not self.rounds_weight_gradients:
            return super().weight_gradient_operands(grad, x)
        size = self.blocks.size
        left = round_in_blocks(grad.flatten(1), self.gradient_dtype, size, 1).view(grad.shape)
        right = round_in_blocks(x.flatten(1), self.dtype, size, 1).view(x.shape)
        return super().weight_gradient_operands(left, right)


@one_operator(
    "(Tensor x, ScalarType dtype, int seed, Tensor? uniform=None) -> Tensor",
    lambda x, *_: x.new_empty(-(-len(x) // _SIZE) * _SIZE * x.shape[1], x.shape[2]),
)
def transform_and_round(x: Tensor, dtype: torch.dtype, seed: int, uniform: Tensor | None = None) -> Tensor:
    """Transform ``[s, b, f]`` along the tokens of each sample, and round blocks of 16 tokens.

    Args:
        seed: sets the signs of `hadamard_transform`.
        uniform: see `round_to_e2m1`.

    Returns:
        What the codes mean, in the dtype of `x`: ``[s b, f]``, with s rounded up to a multiple of 16.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    groups = F.pad(x, (0, 0, 0, 0, 0, -len(x) % _SIZE)).unflatten(0, (-1, _SIZE)).movedim(1, -1)
    transformed = groups.to(wide) @ hadamard_transform(seed).to(x.device, wide).t()  # [g, b, f, 16]
    rounded = round_in_blocks(transformed, dtype, 1, _SIZE, uniform).to(x.dtype)
    return rounded.movedim(-1, 1).flatten(0, 2)


class Nvfp4Gemm(BlockGemm):
    """GEMMs whose operands are rounded to 4 bits, of a layer that has a name.

    Args:
        positions: positions of each sample that this rank holds.

    Attributes:
        name: global name of the layer; `name_gemms` sets it.
        features: numbers of this rank's output features in the whole layer, int64 ``[out]``.
    """

    def __init__(self, settings: Fp8Settings, seed: int, positions: HeldPositions) -> None:
        super().__init__(settings)
        self.samples = settings.samples
        self.seed = seed
        self.positions = positions
        self.name: str | None = None
        self.features = torch.empty(0, dtype=torch.int64)

    def rounded_gradient(self, grad: Tensor) -> Tensor:
        """Round blocks along the features of ``[s, b, out]`` at random."""
        if grad.is_meta:  # planned: without a name, and without numbers
            return round_in_blocks(grad, E2M1, 1, _SIZE)
        # The cuts of an axis are multiples of a block, so a block of the rank is one of the whole layer.
        blocks = self.features[::_SIZE].to(grad.device) // _SIZE
        positions = self._positions(grad)[:, None, None]
        uniform = self._uniform("gradient", positions * 2**32 + blocks)  # [s, b, out/16, 16]
        return round_in_blocks(grad, E2M1, 1, _SIZE, uniform)

    def weight_gradient_operands(self, grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Transform and round ``[s, b, out]`` and ``[s, b, in]`` in blocks of the tokens of each sample.

        Returns:
            ``[s b, out]`` and ``[s b, in]``, with s rounded up to a multiple of 16.
        """
        if not self.rounds_weight_gradients:
            return super().weight_gradient_operands(grad, x)
        if grad.is_meta:
            return transform_and_round(grad, E2M1, self.seed), transform_and_round(x, E2M1, self.seed)
        groups = self._positions(grad)[::_SIZE, None, None] // _SIZE
        uniform = self._uniform("gradient.transposed", groups * 2**32 + self.features.to(grad.device))
        left = transform_and_round(grad, E2M1, self.seed, uniform)
        return left, transform_and_round(x, E2M1, self.seed)

    def _positions(self, x: Tensor) -> Tensor:
        """Return the positions of the tokens of ``[s, b, f]``, int64 ``[s]``."""
        return range_positions(self.positions.ranges(len(x)), x.device)

    def _uniform(self, use: str, blocks: Tensor) -> Tensor:
        """Return numbers between 0 and 1 with 16 random bits, ``[n, b, m, 16]``, for each element of blocks.

        Args:
            use: name of the rounding in the layer.
            blocks: global numbers of the blocks of each sample, int64 ``[n, 1, m]``.
        """
        assert self.name is not None and self.samples.numbers is not None, "random rounding outside of a run"
        numbers = self.samples.numbers.to(blocks.device)[:, None]  # [b, 1]
        key = site_key(self.seed, f"{self.name}.{use}")
        words = random_words(blocks * (_SIZE // 2), _SIZE // 2, numbers, key)  # [n, b, m, 8]
        halves = torch.stack((words & 0xFFFF, words >> 16), dim=-1).flatten(-2)
        return (halves.float() + 0.5) * 2.0**-16


def name_gemms(module: nn.Module, topology: Topology) -> None:
    """Set what the random numbers of each linear layer depend on.

    Args:
        module: module whose submodules have global names, which are the same in every layout.
    """
    for name, layer in module.named_modules():
        gemm = getattr(getattr(layer, "context", None), "gemm", None)
        if isinstance(gemm, Nvfp4Gemm):
            spec = spec_of(layer.weight)
            numbers = torch.arange(math.prod(spec.full_shape[:-1])).view(spec.full_shape[:-1])
            starts, shape = spec.box(topology)
            gemm.name, gemm.features = name, Box(starts[:-1], shape[:-1]).of(numbers).flatten()


@lru_cache(maxsize=8)
def hadamard_transform(seed: int) -> Tensor:
    """Return Sylvester's Hadamard matrix over 4 with columns of random signs, orthogonal, fp64 ``[16, 16]``.

    All layers have the same signs during the whole run, as in NVIDIA's recipe.
    """
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < _SIZE:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    zero = torch.zeros((), dtype=torch.int64)
    signs = 1.0 - 2.0 * (random_words(zero, _SIZE, zero, site_key(seed, "hadamard.signs")) >> 31)
    return matrix * signs / math.sqrt(_SIZE)
