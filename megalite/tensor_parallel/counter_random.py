"""Counter-based random numbers: the same weights and dropout masks in every layout.

Each number is a function of the seed, a global name and an element's global index (Philox, Salmon et al.
2011). It does not depend on the rank or on previously drawn numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megalite.data.microbatch import SampleNumbers, numbers_of
from megalite.distributed.topology import Topology
from megalite.kernels import Drop, ResidualSum, bias_dropout_add, dropout, fill_normal_, site_key
from megalite.kernels.dropout import key_tensor, traced_bias_dropout_add
from megalite.kernels.philox import random_words
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterSpec, spec_of


@torch.no_grad()
def initialize(module: nn.Module, seed: int, topology: Topology) -> None:
    """Fill this rank's boxes of all parameters of `module` by their specs, without communication.

    Args:
        module: module whose parameters have global names, which are the same in every layout.
    """
    for name, parameter in module.named_parameters():
        fill_initial(parameter, name, spec_of(parameter), seed, topology)


@torch.no_grad()
def fill_initial(out: Tensor, name: str, spec: ParameterSpec, seed: int, topology: Topology) -> None:
    """Fill `out` with this rank's box of a parameter's initial weights.

    Args:
        out: contiguous tensor in the box's shape; for bf16 and fp16, fp32 weights are rounded.
        name: the parameter's global name.
    """
    if spec.initial is not None:
        out.copy_(spec.box(topology).of(spec.initial))
        return
    if spec.std == 0.0:
        out.fill_(spec.mean)
        return
    parts = list(even_runs(spec, topology))
    for part, runs in zip(out.view(len(parts), -1), parts, strict=True):
        fill_normal_(
            part,
            site_key(seed, name),
            std=spec.initial_std,
            mean=spec.mean,
            base=runs.base,
            run_length=runs.length,
            run_stride=runs.stride,
        )


class EvenRuns(NamedTuple):
    """Evenly spaced runs of consecutive elements of a full tensor.

    Attributes:
        base: index of the first element in the full tensor.
        length: number of elements of a run.
        stride: distance between the first elements of two runs.
    """

    base: int
    length: int
    stride: int


def even_runs(spec: ParameterSpec, topology: Topology) -> Iterator[EvenRuns]:
    """Yield the elements of this rank's box of a parameter in order, in parts of equal size."""
    (starts, shape), full = spec.box(topology), spec.full_shape
    strides = [math.prod(full[dim + 1 :]) for dim in range(len(full))]
    base = sum(start * stride for start, stride in zip(starts, strides, strict=True))
    # A box consists of runs of consecutive elements of the full tensor, which begin at its last cut dim. They
    # are evenly spaced up to the cut dim before it.
    *_, before, last = 0, 0, *(dim for dim, size in enumerate(shape) if size < full[dim])
    for index in itertools.product(*map(range, shape[:before])):
        offset = sum(i * stride for i, stride in zip(index, strides, strict=False))
        yield EvenRuns(base + offset, math.prod(shape[last:]), math.prod(full[last:]))


class Dropout(nn.Module):
    """Dropout whose mask depends on seed, site, sample and element, but not on the layout.

    Args:
        p: probability that an element becomes 0.
        site: global name of this dropout in the model.
    """

    def __init__(self, p: float, context: LayerContext, site: str) -> None:
        super().__init__()
        self.p = p
        self.context = context
        self.key = site_key(context.seed, site)
        self.key_tensor = key_tensor(self.key)

    def forward(self, x: Tensor, sample_numbers: SampleNumbers) -> Tensor:
        """Return dropout(x) in training, and x in evaluation.

        Args:
            x: ``[s, b, h]``, or ``[s/tp, b, h]`` if sequence parallel.
            sample_numbers: global numbers of the samples in the run, from `Microbatch.samples`.
        """
        if not self.training or self.p == 0.0:
            return x
        groups = self.context.ranges_by_samples(len(x), sample_numbers)
        if len(groups) == 1:  # a split would add a copy to backward
            return self._drop_in_ranges(x, *groups[0])
        columns = x.split([len(numbers) for numbers, _ in groups], dim=1)
        dropped = [self._drop_in_ranges(each, *group) for each, group in zip(columns, groups, strict=True)]
        return torch.cat(dropped, dim=1)

    def add_to(
        self, residual: Tensor, x: Tensor, bias: Tensor | None, sample_numbers: SampleNumbers
    ) -> Tensor:
        """Return ``residual + dropout(x + bias)``, all ``[s, b, h]``, computed by one kernel."""
        (x, bias, p, base), numbers = self._remaining(x, bias, sample_numbers), numbers_of(sample_numbers)
        if torch.compiler.is_compiling():
            return traced_bias_dropout_add(x, bias, residual, p, self.key_tensor, numbers, base=base)
        return bias_dropout_add(x, bias, residual, p, self.key, numbers, base=base)

    def sum_for_norm(
        self, residual: Tensor, x: Tensor, bias: Tensor | None, sample_numbers: SampleNumbers
    ) -> Tensor | ResidualSum:
        """Return the operands of `add_to`, for a norm that also computes the sum.

        In a graph of torch.compile the sum is a separate operator, and its result is returned.
        """
        if torch.compiler.is_compiling():
            return self.add_to(residual, x, bias, sample_numbers)
        x, bias, p, base = self._remaining(x, bias, sample_numbers)
        return ResidualSum(x, bias, residual, p, self.key, numbers_of(sample_numbers), base)

    def attention_drop(self, sample_numbers: SampleNumbers, first_element: int) -> Drop:
        """Return the dropout settings for a kernel that drops attention weights itself.

        Args:
            first_element: index of this rank's first weight among all weights of a sample.
        """
        p, numbers = self.p if self.training else 0.0, numbers_of(sample_numbers)
        if torch.compiler.is_compiling():
            return Drop(p, 0, numbers, first_element, self.key_tensor)
        return Drop(p, self.key, numbers, first_element)

    def _remaining(
        self, x: Tensor, bias: Tensor | None, sample_numbers: SampleNumbers
    ) -> tuple[Tensor, Tensor | None, float, int]:
        """Return x, bias, probability and index of the first element for a kernel of the sum.

        The kernel cannot drop elements whose positions are not consecutive, or differ between samples: that
        is done here, before it.
        """
        p = self.p if self.training else 0.0
        if p == 0.0:
            return x, bias, p, 0
        (_, ranges), *other_samples = self.context.ranges_by_samples(len(x), sample_numbers)
        if len(ranges) == 1 and not other_samples:
            return x, bias, p, ranges[0].start * x.shape[-1]
        return self(x if bias is None else x + bias, sample_numbers), None, 0.0, 0

    def _drop_in_ranges(self, x: Tensor, numbers: Tensor, ranges: Sequence[range]) -> Tensor:
        """Return dropout(x) of samples ``[s, b, h]`` whose tokens have the positions of these ranges."""
        rows = (x,) if len(ranges) == 1 else x.split([*map(len, ranges)])
        parts = [
            dropout(part, self.p, self.key, numbers, base=positions.start * x.shape[-1])
            for part, positions in zip(rows, ranges, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


_PIECE = 1 << 20
"""Elements whose int64 words `Jitter` computes at a time, to bound memory."""


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
