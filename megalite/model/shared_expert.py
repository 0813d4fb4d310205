"""The shared expert of a mixture of experts: an MLP that computes all tokens.

Shapes: s sequence, b microbatch, h hidden size, tp = tp.size.
"""

from __future__ import annotations

from torch import Tensor

from megalite.config import ModelConfig
from megalite.config.model.feed_forward import ExpertsSpec
from megalite.model.mlp import MLP
from megalite.tensor_parallel.parameter_spec import LayerContext
from megalite.tensor_parallel.uncut_linear import UncutLinear
from megalite.utils.wrapping import wrap_point


class SharedExpert(MLP):
    """Computes mlp(x), or, with --moe-shared-expert-gate, sigmoid(gate(x)) * mlp(x).

    The gate is one number for each token (Qwen2-MoE). Every tensor-parallel rank holds its weight ``[1, h]``.
    """

    def __init__(self, config: ModelConfig, context: LayerContext, spec: ExpertsSpec) -> None:
        super().__init__(config, context, spec.shared_width)
        self.gate = None
        if spec.has_shared_gate:
            h, std = config.hidden_size, config.init_method_std
            # One row is no matrix for Muon, which would only divide it by its length.
            self.gate = UncutLinear(h, 1, context, std=std, maps_features=False)

    @wrap_point
    def transform(self, x: Tensor) -> Tensor:
        """Map ``[s, b, h]`` to ``[s, b, h]``, both ``[s/tp, b, h]`` if sequence parallel."""
        y: Tensor = super().transform(x)
        return y if self.gate is None else y * self.gate(x).sigmoid()
