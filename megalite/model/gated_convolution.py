"""Gated short convolution, a mixer whose only state is its last inputs (LFM2: arXiv 2511.23404).

Shapes: s sequence, b microbatch, h channels, which are as many as hidden features, tp = tp.size. A rank has
h/tp of the channels, and computes h' of these, all without context parallelism.
"""

from __future__ import annotations

from torch import Tensor

from megalite.attention.core import StageCore
from megalite.attention.positions import PositionInfo
from megalite.config import ModelConfig
from megalite.config.model.recurrence import GatedConvolutionSpec
from megalite.model.recurrent_mixer import RecurrentMixer, ShortConvolution
from megalite.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, depth_scaled_std
from megalite.tensor_parallel.parameter_spec import LayerContext
from megalite.utils.wrapping import wrap_point


class GatedConvolution(RecurrentMixer):
    """Computes projection(c * convolution(b * x)), where b, c and x are projections of the input; no bias."""

    kernel_problem = "a convolution"

    def __init__(
        self,
        config: ModelConfig,
        context: LayerContext,
        core: StageCore,
        layer: int,
        spec: GatedConvolutionSpec,
    ) -> None:
        super().__init__(context)
        self.spec, self.saved = spec, core.recurrent_state(layer)
        h, std, rows = spec.width, config.init_method_std, spec.group_rows
        self.in_projection = ColumnParallelLinear(
            h, sum(rows) * h, context, bias=False, std=std, fused_rows=rows
        )
        self.convolution = ShortConvolution(h, spec.kernel, std, context, function=lambda y: y)
        self.projection = RowParallelLinear(
            h, h, context, bias=False, std=depth_scaled_std(std, config.num_blocks)
        )

    @wrap_point
    def recur(self, projected: Tensor, positions: PositionInfo) -> Tensor:
        """Compute c * convolution(b * x), ``[s, b, h']``.

        Args:
            projected: b, c and x of each channel, ``[s, b, 3 h']``.
        """
        before, after, x = projected.unflatten(-1, (-1, len(self.spec.group_rows))).unbind(-1)
        saved = self.saved
        y, inputs = self.convolution(
            before * x, positions.document_starts, None if saved is None else saved.inputs
        )
        if saved is not None:
            saved.keep(inputs)
        return after * y
