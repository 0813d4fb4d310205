"""The base class of recurrent mixers: a recurrence between two projections.

Shapes: s sequence, b microbatch, h hidden size, c features of a tensor-parallel rank, tp = tp.size,
cp = cp.size. With context parallelism, every s is s/cp outside of the recurrence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from megalite.attention.exchange import HeadExchange
from megalite.attention.positions import PositionInfo
from megalite.batch.microbatch import SampleNumbers
from megalite.config import RecomputeConfig
from megalite.model.layer_state import BlockOutput
from megalite.model.recompute_region import recompute_core, recompute_output
from megalite.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megalite.tensor_parallel.parameter_spec import LayerContext
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
        """Map ``[s, b, h]`` to the features of this rank's heads for all tokens, ``[s, b, c/cp]``."""
        return self.exchange.to_heads(self.in_projection(x), positions)

    @communication_point
    def keep_own_tokens(self, y: Tensor, positions: PositionInfo) -> Tensor:
        """Return all heads of this rank's tokens, ``[s, b, c]``, of the result of `recur`."""
        return self.exchange.to_tokens(y, positions)

    @abstractmethod
    def recur(self, projected: Tensor, positions: PositionInfo) -> Tensor:
        """Compute the output's features from ``[s, b, c/cp]``, with all tokens; a wrap point."""
