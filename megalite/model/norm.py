"""LayerNorm and RMSNorm, whole on every tensor-parallel rank."""

from __future__ import annotations

from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.kernels import layer_norm_on, rms_norm_on
from megalite.parallel.shard import ParameterSpec, Placement, new_parameter


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + epsilon) * weight + bias over the hidden dim (Ba et al. 2016).

    Args:
        with_residual: forward returns x too, for the residual connection: the gradients of both are added
            in one pass.
    """

    def __init__(self, config: ModelConfig, place: Placement, with_residual: bool = False) -> None:
        super().__init__()
        self.epsilon = config.norm_epsilon
        self.weight = new_parameter(ParameterSpec((config.hidden_size,), mean=1.0, decay=False), place)  # [h]
        self.bias = new_parameter(ParameterSpec((config.hidden_size,), decay=False), place)  # [h]
        functions = layer_norm_on(place.device.type)
        self.normalise = functions.with_residual if with_residual else functions.alone

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return self.normalise(x, self.weight, self.bias, self.epsilon)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * weight over the hidden dim (Zhang and Sennrich 2019).

    Args:
        with_residual: as `LayerNorm`'s.
    """

    def __init__(self, config: ModelConfig, place: Placement, with_residual: bool = False) -> None:
        super().__init__()
        self.epsilon = config.norm_epsilon
        self.weight = new_parameter(ParameterSpec((config.hidden_size,), mean=1.0, decay=False), place)  # [h]
        functions = rms_norm_on(place.device.type)
        self.normalise = functions.with_residual if with_residual else functions.alone

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return self.normalise(x, self.weight, self.epsilon)


NORMS: dict[str, type[LayerNorm] | type[RMSNorm]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


def build_norm(config: ModelConfig, place: Placement, with_residual: bool = False) -> nn.Module:
    """The norm that `config.normalization` names."""
    return NORMS[config.normalization](config, place, with_residual)
