"""LayerNorm and RMSNorm, replicated on every tensor-parallel rank.

With --zero-centered-norms, each norm multiplies by 1 + weight instead of by its weight. The sum is rounded to
the weight's dtype.

Shapes: s sequence, b microbatch, h hidden size, n heads, d head size, tp = tp.size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.distributed.collectives import copy_to_tensor_parallel, reduce_from_tensor_parallel
from megalite.kernels import ResidualSum, layer_norm_on, rms_norm_on
from megalite.kernels.norm import NormFunctions
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterSpec, new_parameter
from megalite.utils.wrapping import wrap_point


class _Norm(nn.Module):
    """Base class of the norms over the last dim.

    Args:
        with_residual: forward returns ``(norm(x), x)``. If a residual connection uses this x, the norm's
            backward kernel adds its gradient to the norm's; autograd would need a separate kernel. x may
            also be a sum that is not yet computed.
        head_dim: normalize heads ``[s, b, n/tp, head_dim]`` of this size instead of hidden states.
        width: normalize vectors ``[s, b, width]`` instead of hidden states.
    """

    functions_on: Callable[[str], NormFunctions]
    has_bias: bool

    def __init__(
        self,
        config: ModelConfig,
        context: LayerContext,
        with_residual: bool = False,
        head_dim: int | None = None,
        width: int | None = None,
    ) -> None:
        super().__init__()
        self.epsilon = config.norm_epsilon
        self.weight, self.scale = _scale(config, context, head_dim, width)  # [h]
        self.bias: Tensor | None = None  # [h]
        if self.has_bias and config.add_norm_bias:
            shift = ParameterSpec(tuple(self.weight.shape), decay=False)
            self.bias = new_parameter(shift, context, used_by_cut_heads=head_dim is not None)
        elif self.has_bias:  # the kernels need one
            self.bias = torch.zeros(self.weight.shape, dtype=context.dtype, device=context.device)
        functions = self.functions_on(context.device.type)
        self.normalize = functions.with_residual if with_residual else functions.alone
        self.normalize_sum = functions.norm_of_sum

    @wrap_point
    def forward(self, x: Tensor | ResidualSum) -> Tensor | tuple[Tensor, Tensor]:
        """Normalize ``[s, b, h]``."""
        normalize = self.normalize_sum if isinstance(x, ResidualSum) else self.normalize
        shift = () if self.bias is None else (self.bias,)
        return normalize(x, self.scale(self.weight), *shift, self.epsilon)


class LayerNorm(_Norm):
    """Computes (x - mean) / sqrt(var + epsilon) * weight + bias over the last dim (Ba et al. 2016).

    With --no-add-norm-bias, the bias is a constant 0 (Cohere).
    """

    functions_on = staticmethod(layer_norm_on)
    has_bias = True


class RMSNorm(_Norm):
    """Computes x / sqrt(mean(x^2) + epsilon) * weight over the last dim (Zhang and Sennrich 2019)."""

    functions_on = staticmethod(rms_norm_on)
    has_bias = False


def _scale(
    config: ModelConfig, context: LayerContext, head_dim: int | None, width: int | None = None
) -> tuple[nn.Parameter, Callable[[Tensor], Tensor]]:
    """Return the weight of a norm, and the function that maps it to the norm's factors.

    Args:
        head_dim, width: see `_Norm`.
    """
    size = head_dim or width or config.hidden_size
    mean, factors = (0.0, _plus_one) if config.zero_centered_norms else (1.0, _itself)
    spec = ParameterSpec((size,), mean=mean, decay=False)
    return new_parameter(spec, context, used_by_cut_heads=head_dim is not None), factors


def _itself(weight: Tensor) -> Tensor:
    return weight


def _plus_one(weight: Tensor) -> Tensor:
    return weight + 1.0


class AllHeadsRMSNorm(nn.Module):
    """Computes RMSNorm over the features of all heads, which tp cuts (Groeneveld et al. 2024, OLMo 2).

    The weight is replicated, and each rank reads the part of its own heads. If several ranks share a
    key/value head, this is the same part.
    """

    def __init__(self, config: ModelConfig, context: LayerContext, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.epsilon, self.tp = config.norm_epsilon, context.tp
        self.num_heads, self.head_dim = num_heads, head_dim
        self.weight, self.scale = _scale(config, context, num_heads * head_dim)  # [n d]

    def forward(self, x: Tensor) -> Tensor:
        """Normalize this rank's heads, ``[s, b, max(1, n/tp), d]``."""
        tp, num_local = self.tp, x.shape[2]
        sharers = num_local * tp.size // self.num_heads  # ranks that hold the same head
        first = tp.rank // sharers * num_local
        weight = self.scale(self.weight).view(self.num_heads, self.head_dim)[first : first + num_local]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = wide.square().sum((2, 3), keepdim=True)  # [s, b, 1, 1]
        # Each rank normalizes its heads by the sum over all, so backward sums over the ranks too.
        total = copy_to_tensor_parallel(reduce_from_tensor_parallel(squares, tp), tp) / sharers
        inverse = (total / (self.num_heads * self.head_dim) + self.epsilon).rsqrt()
        return (wide * inverse).to(x.dtype) * weight


class HeadRMSNorm(nn.Module):
    """Computes x / sqrt(mean(x^2) + epsilon) over the elements of each head, without a weight (Gemma 4)."""

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalize heads ``[s, b, g', d]``."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        inverse = (wide.square().mean(-1, keepdim=True) + self.epsilon).rsqrt()
        return (wide * inverse).to(x.dtype)


NORMS: dict[str, type[LayerNorm] | type[RMSNorm]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


def build_norm(config: ModelConfig, context: LayerContext, with_residual: bool = False) -> nn.Module:
    """Return the norm that `config.normalization` names."""
    return NORMS[config.normalization](config, context, with_residual)


def build_latent_norm(config: ModelConfig, context: LayerContext, width: int) -> nn.Module:
    """Return the norm of a latent ``[s, b, width]`` of multi-latent attention."""
    if not config.qk_layernorm:
        return nn.Identity()
    of_latents = replace(config, norm_epsilon=config.latent_epsilon)
    return NORMS[config.normalization](of_latents, context, width=width)


def build_head_norm(config: ModelConfig, context: LayerContext, num_heads: int, head_dim: int) -> nn.Module:
    """Return the norm of queries or keys ``[s, b, n/tp, d]``, which have `num_heads` heads in all."""
    if not config.qk_layernorm:
        return nn.Identity()
    if config.qk_layernorm_width == "all_heads":
        return AllHeadsRMSNorm(config, context, num_heads, head_dim)
    return NORMS[config.normalization](config, context, head_dim=head_dim)
