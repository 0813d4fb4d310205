"""Experts beside an MLP, with norms of their own (Gemma 4).

Shapes: s sequence, b microbatch, h hidden size, e experts, k experts of a token, tp = tp.size.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config import ModelConfig, RecomputeConfig
from megalite.data.batch.microbatch import SampleNumbers, Terms
from megalite.model.experts import MixtureOfExperts, Router, Routing
from megalite.model.norm import HeadRMSNorm, build_norm
from megalite.model.recompute_region import recompute_first
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterSpec, new_parameter
from megalite.utils.wrapping import eager_point, wrap


class NormedRouter(Router):
    """Normalizes and scales its input, and scales the weights of experts by a learned number for each.

    Attributes:
        scale: ``[h]``, factors of the normalized input, besides 1 / sqrt(h).
        expert_scale: ``[e]``.
    """

    def __init__(self, config: ModelConfig, context: LayerContext, layer: int = 0) -> None:
        super().__init__(config, context, layer)
        self.norm = HeadRMSNorm(config.norm_epsilon)
        self.scale = new_parameter(ParameterSpec((config.hidden_size,), mean=1.0, decay=False), context)
        self.expert_scale = new_parameter(ParameterSpec((self.num_experts,), mean=1.0, decay=False), context)

    def forward(
        self, x: Tensor, sample_numbers: SampleNumbers | None = None, is_real: Tensor | None = None
    ) -> Routing:
        """Route the rank's tokens ``[s, b, h]``, ``[s/tp, b, h]`` if sequence parallel."""
        routing = super().forward(self.norm(x) * self.scale * x.shape[-1] ** -0.5, sample_numbers, is_real)
        experts = routing.experts.clamp_max(self.num_experts - 1)  # e is not an expert: it drops the token
        scales = F.embedding(experts, self.expert_scale.unsqueeze(1)).squeeze(-1)  # [s, b, k]
        return routing._replace(weights=routing.weights * scales)


class NormedExperts(MixtureOfExperts):
    """Computes norm(experts(norm(x))), with a router that reads x itself."""

    def __init__(self, config: ModelConfig, context: LayerContext, layer: int) -> None:
        super().__init__(config, context, NormedRouter(config, context, layer))
        self.input_norm = build_norm(config, context)
        self.output_norm = build_norm(config, context)

    def recompute_parts(self, config: RecomputeConfig, norm: nn.Module) -> None:
        """Let backward recompute the experts; their norms are a part of them."""
        if "mlp" in config.modules:
            wrap(self, "transform", recompute_first)

    @eager_point
    def transform(
        self, x: Tensor, sample_numbers: SampleNumbers | None = None, is_real: Tensor | None = None
    ) -> tuple[Tensor, Terms]:
        """Compute `forward`."""
        y, terms = self.compute_experts(self.input_norm(x), self.router(x, sample_numbers, is_real))
        return self.output_norm(y), terms
