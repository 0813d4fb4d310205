"""The base class of recurrent mixers, a recurrence between two projections, and the convolution before it.

Shapes: s sequence, b microbatch, h hidden size, c features of a tensor-parallel rank, c' those of its heads
whose recurrence this rank computes, k tokens that the convolution sees, tp = tp.size. With context
parallelism, s is the tokens of a rank outside of the recurrence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.attention.exchange import HeadExchange
from megalite.attention.positions import PositionInfo
from megalite.config import RecomputeConfig
from megalite.data.batch.microbatch import BlockOutput, SampleNumbers
from megalite.model.recompute_region import recompute_core, recompute_output
from megalite.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterSpec, new_parameter
from megalite.tensor_parallel.placement import Cut
from megalite.utils.wrapping import communication_point, wrap


class RecurrentMixer(nn.Module, ABC):
    """Computes projection(recur(in_projection(x))); a subclass makes the projections and computes `recur`.

    The rows of the fused input projection are grouped by what a head shares, so that a rank's heads with all
    that belongs to them are one plain slice.

    Attributes:
        kernel_problem: why plain PyTorch computes the recurrence; empty if GPU kernels do.
    """

    kernel_problem: str
    in_projection: ColumnParallelLinear
    projection: RowParallelLinear

    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        self.exchange = HeadExchange(context)

    def recompute_parts(self, config: RecomputeConfig, norm: nn.Module) -> None:
        """Let backward recompute the recurrence between the projections, and the norm of the input."""
        if "core_attn" in config.modules:
            wrap(self, "recur", recompute_core)
        if "layernorm" in config.modules:
            recompute_output(norm, "forward", self, "project_in")

    def forward(self, x: Tensor, sample_numbers: SampleNumbers, positions: PositionInfo) -> BlockOutput:
        """Map ``[s, b, h]`` to ``[s, b, h]``, both ``[s/tp, b, h]`` if sequence parallel."""
        projected = self.project_in(x, positions)
        y = self.keep_own_tokens(self.recur(projected, positions), positions)
        return BlockOutput(self.projection(y), self.projection.bias)

    @communication_point
    def project_in(self, x: Tensor, positions: PositionInfo) -> Tensor:
        """Map ``[s, b, h]`` to the features of this rank's heads for all tokens, ``[s, b, c']``."""
        return self.exchange.to_heads(self.in_projection(x), positions)

    @communication_point
    def keep_own_tokens(self, y: Tensor, positions: PositionInfo) -> Tensor:
        """Return all heads of this rank's tokens, ``[s, b, c]``, of the result of `recur`."""
        return self.exchange.to_tokens(y, positions)

    @abstractmethod
    def recur(self, projected: Tensor, positions: PositionInfo) -> Tensor:
        """Compute the output's features from ``[s, b, c']``, with all tokens; a wrap point."""


class ShortConvolution(nn.Module):
    """Computes silu(sum_i weight_i * x[t - k + 1 + i] + bias) for each channel; tp cuts the channels.

    A channel mixes a token with the few tokens before it. A rank computes the channels of its heads. Tokens
    before the start of a document count as zeros. The sums are in at least fp32, and backward keeps x in its
    own dtype.

    Args:
        channels: channels of all ranks.
        kernel: k.
        bias: add a bias to each channel, which starts at zero.
    """

    def __init__(
        self, channels: int, kernel: int, std: float, context: LayerContext, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.exchange = HeadExchange(context)
        cut = Cut("tp", 0)
        spec = ParameterSpec((channels, kernel), cut, std=std, maps_features=False)
        self.weight = new_parameter(spec, context)  # [channels/tp, k]
        self.bias = (
            new_parameter(ParameterSpec((channels,), cut, decay=False), context) if bias else None
        )  # [channels/tp]

    def forward(
        self, x: Tensor, starts: Tensor | None = None, before: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Mix the tokens ``[s, b, c']``.

        Args:
            starts: see `PositionInfo`.
            before: inputs before x, ``[b, k - 1, c']``; by default zeros.

        Returns:
            The result, ``[s, b, c']``, and the last inputs, ``[b, k - 1, c']``.
        """
        own, wide = self.exchange.own, torch.promote_types(x.dtype, torch.float32)
        weight = own(self.weight).to(wide)  # [c', k]
        num_tokens, past = x.shape[0], weight.shape[1] - 1
        if before is None:
            before = x.new_zeros(x.shape[1], past, x.shape[2])
        padded = torch.cat((before.transpose(0, 1), x))  # [k - 1 + s, b, c']
        y = x * weight[:, past]
        for distance in range(1, past + 1):
            shifted = padded[past - distance : past - distance + num_tokens]
            product = shifted * weight[:, past - distance]
            if starts is not None:
                product = product.where(is_within(starts, distance), 0.0)
            y = y + product
        if self.bias is not None:
            y = y + own(self.bias).to(wide)
        return F.silu(y).to(x.dtype), padded[num_tokens:].transpose(0, 1)


def is_within(starts: Tensor, distance: int) -> Tensor:
    """Return which tokens have a token of their document at a distance before them, ``[s, b, 1]``."""
    positions = torch.arange(starts.shape[1], device=starts.device)
    return (positions - distance >= starts).t().unsqueeze(-1)
