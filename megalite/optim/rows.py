"""What a rank has of a parameter whose weights are shared out among data-parallel ranks too."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megalite.optim.part import Part
from megalite.parallel.shard import ParameterSpec, spec_of
from megalite.topology import Axis


class Rows:
    """This rank's rows of a parameter: a stretch of its elements, flat.

    torch cuts the first dim into chunks of one size; the last of them may be smaller, or empty.

    Attributes:
        parameter: a DTensor of the main weights, that torch puts in the whole one's place between uses.
        shape: of the whole parameter, as the model made it.
        start: place of this rank's first element among the parameter's.
        moments: by torch's names, ``[n]``.
    """

    def __init__(self, name: str, parameter: nn.Parameter, shape: tuple[int, ...], dp: Axis) -> None:
        self.name = name
        self.parameter = parameter
        self.shape = shape
        num_rows, *row = parameter.shape
        chunk = -(-num_rows // dp.size)
        self.start = min(chunk * dp.rank, num_rows) * math.prod(row)
        self.moments = {moment: torch.zeros_like(self.main) for moment in ("exp_avg", "exp_avg_sq")}

    @property
    def spec(self) -> ParameterSpec:
        return spec_of(self.parameter)

    @property
    def decay(self) -> bool:
        """Whether weight decay applies."""
        return self.spec.decay

    @property
    def is_cut(self) -> bool:
        """Whether the parameter is cut over tp; else each tp rank has these rows."""
        return self.spec.shard is not None

    @property
    def main(self) -> Tensor:
        """The main weights, ``[n]``."""
        return _local(self.parameter.data)

    @property
    def gradient(self) -> Tensor:
        """The sum of the gradients that have come in, ``[n]``."""
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter.data)
        return _local(self.parameter.grad)

    def publish(self) -> None:
        """Nothing: what the model computes with is made from the main weights at each use."""

    def part(self, tensor: Tensor) -> Part:
        """A tensor of these elements, ``[n]``, as a part of the parameter."""
        return Part(tensor, self.start, self.shape, self.spec, is_copied=False)

    def whole_weight(self) -> Tensor:
        """The main weights of all ranks, in the parameter's shape; every rank of dp calls it."""
        return self._whole(self.parameter.data)

    def whole_gradient(self) -> Tensor:
        """The gradient's rows of all ranks, in the parameter's shape; every rank of dp calls it."""
        assert self.parameter.grad is not None
        return self._whole(self.parameter.grad)

    def _whole(self, tensor: Tensor) -> Tensor:
        assert isinstance(tensor, DTensor)
        return tensor.full_tensor().view(self.shape)


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local().view(-1)
