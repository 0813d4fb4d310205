"""The feed-forward block, sharded over tensor-parallel ranks along its inner features.

Shapes: s sequence, b microbatch, h hidden size, ffn inner features, tp = tp.size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.attention.positions import PositionInfo
from megalite.config import ModelConfig, RecomputeConfig
from megalite.config.model.feed_forward import ExpertsSpec
from megalite.data.microbatch import BlockOutput, SampleNumbers
from megalite.kernels import bias_gelu, bias_swiglu
from megalite.model.recompute_region import recompute, recompute_output
from megalite.tensor_parallel.linear import (
    Activated,
    ColumnParallelLinear,
    RowParallelLinear,
    depth_scaled_std,
)
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterSpec, new_parameter
from megalite.tensor_parallel.uncut_linear import UncutLinear
from megalite.utils.wrapping import wrap, wrap_point


class ActivationFunction(NamedTuple):
    """Activation, and whether its kernel adds the bias of the GEMM before it.

    Attributes:
        function: maps ``[..., n]``, and also takes the bias ``[n]`` or None if `adds_bias`.
        adds_bias: whether the kernel adds the bias; otherwise the GEMM adds it, at no cost.
        is_gelu: whether it is GELU, which some GPUs compute, with its gradient, in the neighbouring GEMMs.
    """

    function: Callable[..., Tensor]
    adds_bias: bool = False
    is_gelu: bool = False


def quick_gelu(x: Tensor) -> Tensor:
    """Return x sigmoid(1.702 x), an approximation of GELU (Hendrycks and Gimpel 2016)."""
    return x * torch.sigmoid(1.702 * x)


GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": partial(F.gelu, approximate="tanh"),
    "geglu_exact": F.gelu,
    "quick_geglu": quick_gelu,
    "reglu": F.relu,
}
"""Functions of the gate in gated activations (Shazeer 2020)."""


def gated(
    x: Tensor, gate_of: Callable[[Tensor], Tensor], limit: float | None, offset: float, factor: float = 1.0
) -> Tensor:
    """Return gate_of(factor g) * (u + offset), where g and u are the two halves of x.

    PyTorch's operators compute it. Backward keeps the operands of the product besides x.

    Args:
        limit: bound of g from above, and of u from both sides (GPT-OSS); None without bound.
    """
    gate, up = x.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    gate = gate if factor == 1.0 else gate * factor
    return gate_of(gate) * (up if offset == 0.0 else up + offset)


def squared_relu(x: Tensor) -> Tensor:
    """Return relu(x)^2 (So et al. 2021; Nemotron-4)."""
    return F.relu(x).square()


class XIELU(nn.Module):
    """Computes xIELU (Huang and Schlag 2024, arXiv 2411.13010; Apertus), with two learned numbers p and n.

    It is p x^2 + x / 2 for positive x, and n (exp(x) - 1 - x) + x / 2 for others. The parameters are those of
    p = softplus(alpha_p) and n = 1 / 2 + softplus(alpha_n); initially, p and n are 0.8. Each rank's features
    have their part of the gradients.
    """

    SLOPE, LARGEST = 0.5, -1e-6
    """Slope at 0, and the largest argument of the exponential."""

    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        specs = [ParameterSpec((1,), mean=_inverse_softplus(p), decay=False) for p in (0.8, 0.8 - self.SLOPE)]
        self.alpha_p, self.alpha_n = (new_parameter(each, context, used_by_cut_heads=True) for each in specs)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., ffn/tp]`` to the same shape."""
        positive, negative = F.softplus(self.alpha_p), self.SLOPE + F.softplus(self.alpha_n)
        curved = torch.where(x > 0, positive * x * x, negative * (torch.expm1(x.clamp(max=self.LARGEST)) - x))
        return curved + self.SLOPE * x


def _inverse_softplus(y: float) -> float:
    return math.log(math.expm1(y))


ACTIVATION_FUNCTIONS = {
    "gelu": ActivationFunction(bias_gelu, adds_bias=True, is_gelu=True),
    "gelu_exact": ActivationFunction(F.gelu),
    "relu": ActivationFunction(F.relu),
    "squared_relu": ActivationFunction(squared_relu),
    "swiglu": ActivationFunction(bias_swiglu, adds_bias=True),
}
"""Activations without options, and those of GATES that have a kernel of their own."""


def activation_of(config: ModelConfig) -> ActivationFunction:
    """Return the activation of a model's MLPs."""
    limit, offset = config.activation_func_clamp_value, config.glu_linear_offset
    factor, _ = config.mlp_multipliers or (1.0, 1.0)
    has_options = config.is_gated and (limit is not None or offset != 0.0 or factor != 1.0)
    if config.activation in ACTIVATION_FUNCTIONS and not has_options:
        return ACTIVATION_FUNCTIONS[config.activation]
    gate_of = GATES[config.activation]
    return ActivationFunction(partial(gated, gate_of=gate_of, limit=limit, offset=offset, factor=factor))


def multiply_output(factor: float, y: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return a block's output and its bias, which is added later, times a factor."""
    if factor == 1.0:
        return y, bias
    return y * factor, None if bias is None else bias * factor


class MLP(nn.Module):
    """Computes m down(activation(up(x))), m of --mlp-multipliers; the layer adds the bias of `down`.

    The weight of `up` is ``[ffn/tp, h]``; for a gated activation two halves are stacked, ``[2, ffn/tp, h]``.

    Args:
        ffn: by default the config's.
    """

    def __init__(self, config: ModelConfig, context: LayerContext, ffn: int | None = None) -> None:
        super().__init__()
        h, bias, std = config.hidden_size, config.has_mlp_bias, config.init_method_std
        ffn = config.ffn_size if ffn is None else ffn
        up_shape = (2, ffn) if config.is_gated else (ffn,)
        self.xielu = XIELU(context) if config.activation == "xielu" else None
        self.activation = (
            activation_of(config) if self.xielu is None else ActivationFunction(self.xielu.forward)
        )
        self.up = ColumnParallelLinear(
            h,
            up_shape,
            context,
            bias=bias,
            std=std,
            skip_bias_add=self.activation.adds_bias,
            fuses_gelu=self.activation.is_gelu,
            width_ratio=config.width_ratio,
        )
        self.down = RowParallelLinear(
            ffn,
            h,
            context,
            bias=bias,
            std=depth_scaled_std(std, config.num_blocks),
            skip_bias_add=True,
            width_ratio=config.width_ratio,
        )
        self.factor = (config.mlp_multipliers or (1.0, 1.0))[1]

    def recompute_parts(self, config: RecomputeConfig, norm: nn.Module) -> None:
        """Let backward recompute the MLP with its norm, the activation or the norm, or the MLP in chunks."""
        if config.mlp_chunks > 1:
            for linear in (self.up, self.down):
                # Weight gradients stored for later would hold the wide activations of all chunks.
                linear.context = replace(linear.context, store=None)
            wrap(self, "transform", lambda transform: partial(_in_chunks, transform, config.mlp_chunks))
        if "mlp" in config.modules:
            recompute_output(norm, "forward", self, "transform", recompute_consumer=True)
            return
        if "layernorm" in config.modules:
            first = "project_up" if config.mlp_chunks == 1 else "transform"
            recompute_output(norm, "forward", self, first)
        if "mlp_act" in config.modules:
            self.up.fuses_gelu = False  # only the activation's input is kept, not its output
            recompute_output(self, "activate", self, "project_down")

    def forward(
        self,
        x: Tensor,
        sample_numbers: SampleNumbers | None = None,
        positions: PositionInfo | None = None,
    ) -> BlockOutput:
        """Map ``[s, b, h]`` to ``[s, b, h]``, both ``[s/tp, b, h]`` if sequence parallel.

        Args:
            sample_numbers: experts in the place of an MLP use them.
            positions: likewise.
        """
        return BlockOutput(*multiply_output(self.factor, self.transform(x), self.down.bias))

    @wrap_point
    def transform(self, x: Tensor) -> Tensor:
        """Compute `forward` without the bias."""
        return self.project_down(self.activate(self.project_up(x)))

    @wrap_point
    def project_up(self, x: Tensor) -> Tensor | Activated:
        """Map ``[s, b, h]`` to the input of `activate`."""
        y: Tensor | Activated = self.up(x)
        return y

    @wrap_point
    def activate(self, x: Tensor | Activated) -> Tensor | Activated:
        """Map `up`'s ``[s, b, ffn/tp]``, or ``[s, b, 2 ffn/tp]`` if gated, to ``[s, b, ffn/tp]``."""
        if isinstance(x, Activated):  # the GEMM of `up` applied the activation
            return x
        function, adds_bias, _ = self.activation
        return function(x, self.up.bias) if adds_bias else function(x)

    @wrap_point
    def project_down(self, x: Tensor | Activated) -> Tensor:
        """Map ``[s, b, ffn/tp]`` to ``[s, b, h]``."""
        y: Tensor = self.down(x)
        return y


class SharedExpert(MLP):
    """Computes mlp(x), or, with --moe-shared-expert-gate, sigmoid(gate(x)) * mlp(x).

    The gate is one number for each token (Qwen2-MoE). Every tensor-parallel rank holds its weight ``[1, h]``.
    """

    def __init__(self, config: ModelConfig, context: LayerContext, spec: ExpertsSpec) -> None:
        super().__init__(config, context, spec.shared_width)
        self.gate = None
        if spec.has_shared_gate:
            h, std = config.hidden_size, config.init_method_std
            # One row is no matrix for an optimizer of matrices, which would only divide it by its length.
            self.gate = UncutLinear(h, 1, context, std=std, maps_features=False)

    @wrap_point
    def transform(self, x: Tensor) -> Tensor:
        """Map ``[s, b, h]`` to ``[s, b, h]``, both ``[s/tp, b, h]`` if sequence parallel."""
        y: Tensor = super().transform(x)
        return y if self.gate is None else y * self.gate(x).sigmoid()


def _in_chunks(transform: Callable[[Tensor], Tensor], num_chunks: int, x: Tensor) -> Tensor:
    """Return transform(x), computed and recomputed chunk by chunk of the sequence, or of the rank's slice."""
    return torch.cat([recompute(transform, chunk) for chunk in x.tensor_split(min(num_chunks, x.shape[0]))])
