"""GEMMs of linear layers in 4 bits (NVIDIA 2025, "Pretraining Large Language Models with NVFP4").

    GEMM               operand                 blocks     before rounding        rounding
    output             input                   1 x 16                            to nearest
                       weight                  16 x 16                           to nearest
    input gradient     gradient                1 x 16                            at random
                       weight                  16 x 16                           to nearest
    weight gradient    gradient, transposed    1 x 16     Hadamard transform     at random
                       input, transposed       1 x 16     Hadamard transform     to nearest

(arXiv 2509.25149, section 4.) Rounding at random gives the upper neighbour with a probability equal to the
distance from the lower one, so that its mean is the number itself. The transform multiplies 16 consecutive
tokens of a sample by an orthogonal matrix, which spreads outliers over them and cancels in the GEMM.

A random number is a function of the seed, the layer's name, the sample's number in the run, the token's
position and the output feature, like a dropout mask. Every layout and every micro-batch size rounds alike.

Shapes: s sequence, b microbatch, f output or input features, g = s/16 groups of tokens.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.distributed.axis import HeldPositions, range_positions
from megalite.distributed.topology import Topology
from megalite.kernels import site_key
from megalite.kernels.philox import random_words
from megalite.tensor_parallel.block_scaling import BlockGemm, round_in_blocks
from megalite.tensor_parallel.fp8 import E2M1, Fp8Settings
from megalite.tensor_parallel.parameter_spec import spec_of
from megalite.tensor_parallel.placement import Box

_SIZE = 16
"""Elements of a block, and of a vector that is transformed."""


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
        self.transform = hadamard_transform(seed)
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
            return self._transformed(grad, None), self._transformed(x, None)
        groups = self._positions(grad)[::_SIZE, None, None] // _SIZE
        uniform = self._uniform("gradient.transposed", groups * 2**32 + self.features.to(grad.device))
        return self._transformed(grad, uniform), self._transformed(x, None)

    def _transformed(self, x: Tensor, uniform: Tensor | None) -> Tensor:
        """Transform and round ``[s, b, f]`` along the tokens, and return ``[s b, f]``."""
        wide = torch.promote_types(x.dtype, torch.float32)
        groups = F.pad(x, (0, 0, 0, 0, 0, -len(x) % _SIZE)).unflatten(0, (-1, _SIZE)).movedim(1, -1)
        transformed = groups.to(wide) @ self.transform.to(x.device, wide).t()  # [g, b, f, 16]
        rounded = round_in_blocks(transformed, E2M1, 1, _SIZE, uniform).to(x.dtype)
        return rounded.movedim(-1, 1).flatten(0, 2)

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
