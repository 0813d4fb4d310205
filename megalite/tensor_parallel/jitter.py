"""Multiply hidden states by random numbers near 1 that are the same in every layout.

Shapes: s positions of a rank, b microbatch, h hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalite.batch.microbatch import SampleNumbers, numbers_of
from megalite.kernels import site_key
from megalite.kernels.philox import random_words
from megalite.tensor_parallel.parameter_spec import LayerContext

_PIECE = 1 << 20
"""Elements whose int64 words are computed at a time, to bound memory."""


class Jitter(nn.Module):
    """Factors from 1 - eps to 1 + eps, uniform, on each element in training (Fedus et al. 2022).

    The number is a function of seed, site, sample and element, as the mask of a `Dropout`.

    Args:
        site: global name of this jitter in the model.
    """

    def __init__(self, eps: float, context: LayerContext, site: str) -> None:
        super().__init__()
        self.eps = eps
        self.context = context
        self.key = site_key(context.seed, site)

    def forward(self, x: Tensor, sample_numbers: SampleNumbers) -> Tensor:
        """Return the product in training, and x in evaluation.

        Args:
            x: ``[s, b, h]``.
            sample_numbers: global numbers of the samples in the run.
        """
        if not self.training:
            return x
        length, num_samples, width = x.shape
        positions, numbers = self.context.positions_of(x, sample_numbers), numbers_of(sample_numbers)
        rows = max(1, _PIECE // (num_samples * width))
        factors = torch.empty_like(x, requires_grad=False)
        for start in range(0, length, rows):
            firsts = positions[start : start + rows] * width
            words = random_words(firsts, width, numbers, self.key)
            # (word + 1/2) / 2^31 is between 0 and 2.
            factors[start : start + rows] = 1.0 + self.eps * ((words.double() + 0.5) * 2.0**-31 - 1.0)
        return x * factors
