"""Random numbers by counter: the same weights and dropout masks in any layout.

Each number is a function of the seed, a global name and an element's global index (Salmon et al. 2011), never
of how many numbers were drawn before or on which rank.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from megalite.kernels import Drop, bias_dropout_add, dropout, fill_normal_, site_key
from megalite.kernels.traced import key_tensor, traced_bias_dropout_add
from megalite.parallel.shard import ParameterSpec, axis_of, spec_of
from megalite.topology import Topology


@torch.no_grad()
def initialize(module: nn.Module, seed: int, topology: Topology) -> None:
    """Fills every parameter of `module` by its spec: a rank fills its own slices, and nothing is sent.

    Args:
        module: its parameters' names are global: they name the same weight in every layout.
    """
    for name, parameter in module.named_parameters():
        fill_initial(parameter, name, spec_of(parameter), seed, topology)


@torch.no_grad()
def fill_initial(out: Tensor, name: str, spec: ParameterSpec, seed: int, topology: Topology) -> None:
    """Fills `out` with this rank's slice of a parameter's initial weights.

    Args:
        out: of the slice's shape, contiguous; in bf16 or fp16 it gets the fp32 weights rounded.
        name: the parameter's global name.
    """
    if spec.std == 0.0:
        out.fill_(spec.mean)
        return
    axis = axis_of(spec, topology)
    dim = 0 if spec.shard is None else spec.shard.dim
    run_length = math.prod(out.shape[dim:])  # elements in a row in the full tensor
    fill_normal_(
        out,
        site_key(seed, name),
        std=spec.std,
        mean=spec.mean,
        base=0 if axis is None else axis.rank * run_length,
        run_length=run_length,
        run_stride=math.prod(spec.full_shape[dim:]),
    )


class Dropout(nn.Module):
    """Dropout whose mask depends on seed, site, sample and element, never on the layout.

    Args:
        p: probability that an element becomes 0.
        site: global name of this place in the model.
    """

    def __init__(self, p: float, seed: int, site: str) -> None:
        super().__init__()
        self.p = p
        self.key = site_key(seed, site)
        self.key_tensor = key_tensor(self.key)

    def forward(self, x: Tensor, sample_numbers: Tensor, base: int = 0) -> Tensor:
        """Drops elements while training, and does nothing in evaluation.

        Args:
            x: ``[n, b, ...]``; dim 1 is the sample.
            sample_numbers: int64 ``[b]``, global numbers of the samples in the run.
            base: index, within one sample's full activation, of the first element that this rank holds.
        """
        if not self.training or self.p == 0.0:
            return x
        return dropout(x, self.p, self.key, sample_numbers, base=base)

    def of_weights(self, sample_numbers: Tensor, base: int) -> Drop:
        """What attention needs to drop weights itself, by the index of its first one."""
        p = self.p if self.training else 0.0
        if torch.compiler.is_compiling():
            return Drop(p, 0, sample_numbers, base, self.key_tensor)
        return Drop(p, self.key, sample_numbers, base)

    def add(
        self, x: Tensor, bias: Tensor | None, residual: Tensor, sample_numbers: Tensor, base: int = 0
    ) -> Tensor:
        """``residual + forward(x + bias)``, all ``[n, b, h]``, in one pass over them."""
        p = self.p if self.training else 0.0
        if torch.compiler.is_compiling():
            return traced_bias_dropout_add(x, bias, residual, p, self.key_tensor, sample_numbers, base=base)
        return bias_dropout_add(x, bias, residual, p, self.key, sample_numbers, base=base)
