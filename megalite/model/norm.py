"""LayerNorm and RMSNorm, replicated on every tensor-parallel rank.

Shapes: s sequence, b microbatch, h hidden size.
"""

from __future__ import annotations

from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.kernels import ResidualSum, layer_norm_on, rms_norm_on
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterSpec, new_parameter


class LayerNorm(nn.Module):
    """Computes (x - mean) / sqrt(var + epsilon) * weight + bias over the hidden dim (Ba et al. 2016).

    Args:
        with_residual: forward returns ``(norm(x), x)``. If a residual connection uses this x, the norm's
            backward kernel adds its gradient to the norm's; autograd would need a separate kernel. x may
            also be a sum that is not yet computed.
    """

    def __init__(self, config: ModelConfig, context: LayerContext, with_residual: bool = False) -> None:
        super().__init__()
        self.epsilon = config.norm_epsilon
        weight = ParameterSpec((config.hidden_size,), mean=1.0, decay=False)
        self.weight = new_parameter(weight, context)  # [h]
        self.bias = new_parameter(ParameterSpec((config.hidden_size,), decay=False), context)  # [h]
        functions = layer_norm_on(context.device.type)
        self.normalize = functions.with_residual if with_residual else functions.alone
        self.normalize_sum = functions.of_sum

    def forward(self, x: Tensor | ResidualSum) -> Tensor | tuple[Tensor, Tensor]:
        """Normalize ``[s, b, h]``."""
        normalize = self.normalize_sum if isinstance(x, ResidualSum) else self.normalize
        return normalize(x, self.weight, self.bias, self.epsilon)


class RMSNorm(nn.Module):
    """Computes x / sqrt(mean(x^2) + epsilon) * weight over the hidden dim (Zhang and Sennrich 2019).

    Args:
        with_residual: see `LayerNorm`.
    """

    def __init__(self, config: ModelConfig, context: LayerContext, with_residual: bool = False) -> None:
        super().__init__()
        self.epsilon = config.norm_epsilon
        weight = ParameterSpec((config.hidden_size,), mean=1.0, decay=False)
        self.weight = new_parameter(weight, context)  # [h]
        functions = rms_norm_on(context.device.type)
        self.normalize = functions.with_residual if with_residual else functions.alone
        self.normalize_sum = functions.of_sum

    def forward(self, x: Tensor | ResidualSum) -> Tensor | tuple[Tensor, Tensor]:
        """Normalize ``[s, b, h]``."""
        normalize = self.normalize_sum if isinstance(x, ResidualSum) else self.normalize
        return normalize(x, self.weight, self.epsilon)


NORMS: dict[str, type[LayerNorm] | type[RMSNorm]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


def build_norm(config: ModelConfig, context: LayerContext, with_residual: bool = False) -> nn.Module:
    """Return the norm that `config.normalization` names."""
    return NORMS[config.normalization](config, context, with_residual)
