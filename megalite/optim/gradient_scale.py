"""Scale the loss, and compute the norm of gradients by which they are clipped.

Loss scaling keeps fp16 gradients within fp16's range (Micikevicius et al. 2018). A norm counts the elements
of all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.config import OptimizerConfig
from megalite.config.optimizer import MAX_LOSS_SCALE
from megalite.distributed.collectives import all_reduce
from megalite.distributed.topology import Topology
from megalite.utils.torch_private import foreach_norm

BLOCKS = {"cpu": 2**16}
"""Number of squares to sum in one call, by device; on other devices all, because the op splits them.

torch's CPU norm adds squares in a few long fp32 chains: the result for 1e8 elements is 1% too small, and the
error depends on the layout. Blocks of this size are exact to 2e-7."""


class CountedShard(NamedTuple):
    """Elements of a parameter that this rank counts in norms, and no other rank of the world.

    Attributes:
        main: main weights, ``[n]``.
        gradient: complete gradient, ``[n]``.
        moments: AdamW's moments, or a matrix's momentum, by torch's names, ``[n]``.
        num_used: number of elements before the vocabulary's padding.
    """

    name: str
    main: Tensor
    gradient: Tensor
    moments: Mapping[str, Tensor]
    num_used: int


def global_norm(gradients: Iterable[Tensor], topology: Topology) -> Tensor:
    """Return the 2-norm of the whole model's gradient, the same number on every rank.

    Args:
        gradients: the parts of the gradient that only this rank counts.

    Returns:
        An fp64 scalar: squares of fp32 norms overflow fp32 long before the gradient does.
    """
    return all_reduce(sum_of_squares(gradients, topology.device), topology.world).sqrt()


def sum_of_squares(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares of all elements, an fp64 scalar."""
    blocks = [
        block
        for gradient in gradients
        for block in gradient.view(-1).split(BLOCKS.get(gradient.device.type, sys.maxsize))
    ]
    if not blocks:
        return torch.zeros((), dtype=torch.float64, device=device)
    here: list[Tensor] = []
    offloaded: list[Tensor] = []  # main weights may be offloaded
    for norm in foreach_norm(blocks):
        (here if norm.device.type == device.type else offloaded).append(norm)
    norms = torch.cat([torch.stack(part).to(device) for part in (here, offloaded) if part])
    return norms.double().square().sum()


GROWTH = 2.0
BACKOFF = 0.5


class LossScaler:
    """Constant factor on the loss; 1 changes nothing.

    It is on the host, so reading it does not wait for kernels.
    """

    def __init__(self, scale: float) -> None:
        self._scale = torch.tensor(scale, dtype=torch.float32)

    @property
    def scale(self) -> float:
        """Return the factor on the loss of the next backward pass."""
        # A checkpoint of an older version may have a larger scale.
        return min(self._scale.item(), MAX_LOSS_SCALE)

    @property
    def can_go_down(self) -> bool:
        """Return whether the scale may cause an infinite gradient and can still be lowered."""
        return False

    def update(self, overflowed: bool) -> None:
        """Update the scale after an iteration, given whether its gradient was infinite or NaN."""

    def state(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint, as views; a constant scale has none."""
        return {}


class DynamicLossScaler(LossScaler):
    """Scale that is halved on overflows and doubled after a window without overflow; Megatron's rule.

    After `hysteresis` overflows, every overflow halves the scale until the scale grows; only growth resets
    the count. Unlike in Megatron, the scale is at most `MAX_LOSS_SCALE`; torch's `GradScaler` limits it to
    the largest finite number.
    """

    def __init__(self, config: OptimizerConfig) -> None:
        super().__init__(config.initial_loss_scale)
        self.config = config
        self._num_good = torch.zeros((), dtype=torch.int64)
        self._patience = torch.tensor(config.hysteresis, dtype=torch.int64)

    @property
    def can_go_down(self) -> bool:
        return self.scale > self.config.min_loss_scale

    def update(self, overflowed: bool) -> None:
        self._scale.clamp_(max=MAX_LOSS_SCALE)
        if overflowed:
            self._num_good.zero_()
            self._patience -= 1
            if self._patience.item() <= 0:
                self._scale.mul_(BACKOFF).clamp_(min=self.config.min_loss_scale)
            return
        self._num_good += 1
        if self._num_good.item() == self.config.loss_scale_window:
            self._num_good.zero_()
            self._patience.fill_(self.config.hysteresis)
            self._scale.mul_(GROWTH).clamp_(max=MAX_LOSS_SCALE)

    def state(self) -> dict[str, Tensor]:
        return {"scale": self._scale, "num_good": self._num_good, "patience": self._patience}


def build_loss_scaler(config: OptimizerConfig, dtype: torch.dtype) -> LossScaler:
    """Return the scaler for weights of `dtype`: only fp16 has a smaller range than fp32."""
    if dtype != torch.float16:
        return LossScaler(1.0)
    return DynamicLossScaler(config) if config.loss_scale is None else LossScaler(config.loss_scale)
