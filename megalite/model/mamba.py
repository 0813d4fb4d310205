"""Mamba-2, a recurrent mixer, over the heads of one rank.

Shapes: s sequence, b microbatch, h hidden size, g groups, r heads of a group, n = g r heads, p head size,
d state size, tp = tp.size. A rank has g/tp of the groups with their heads, and computes g' of these groups,
all without context parallelism, with n' heads.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.attention.core import StageCore
from megalite.attention.positions import PositionInfo
from megalite.config import ModelConfig
from megalite.config.model.recurrence import MambaSpec
from megalite.kernels import recurrence, recurrence_problem
from megalite.model.recurrent_mixer import RecurrentMixer, ShortConvolution, chunked_recurrence
from megalite.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, depth_scaled_std
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterSpec, new_parameter
from megalite.tensor_parallel.placement import Cut
from megalite.utils.wrapping import wrap_point

_DECAY_RATES = (1.0, 16.0)
"""Range of the initial exp(A_log)."""
_TIME_STEPS = (1e-3, 1e-1)
"""Range of the initial time steps of tokens whose own part is 0."""
_GOLDEN_RATIO = (math.sqrt(5.0) - 1.0) / 2.0


class Mamba(RecurrentMixer):
    """Computes Mamba-2 of a sample's tokens (Dao and Gu 2024, arXiv 2405.21060, section 7).

    `MambaSpec.group_rows` lists the rows of the input projection for a group of heads. --mamba-norm of the
    output is over each group.
    """

    def __init__(
        self, config: ModelConfig, context: LayerContext, core: StageCore, layer: int, spec: MambaSpec
    ) -> None:
        super().__init__(context)
        self.spec = spec
        self.epsilon = config.norm_epsilon
        self.saved = core.recurrent_state(layer)
        heads = spec.state_dim, spec.head_dim
        self.kernel_problem = recurrence_problem(context.device, context.dtype, *heads)
        h, bias, std = config.hidden_size, config.has_mamba_bias, config.init_method_std
        self.in_projection = ColumnParallelLinear(
            h,
            spec.num_groups * sum(spec.group_rows),
            context,
            bias=bias,
            std=std,
            fused_rows=spec.group_rows,
        )
        std_of_torch = 1.0 / math.sqrt(3 * spec.kernel)
        channels = spec.num_groups * spec.num_mixed
        self.convolution = ShortConvolution(channels, spec.kernel, std_of_torch, context, bias=True)
        rates, steps = initial_rates(spec), initial_time_steps(spec)
        self.A_log = _of_heads(rates.log(), context)  # [n/tp]
        self.dt_bias = _of_heads(steps + (-(-steps).expm1()).log(), context)  # [n/tp], softplus gives steps
        self.D = _of_heads(torch.ones_like(rates), context)  # [n/tp]
        norm = ParameterSpec((spec.width,), Cut("tp", 0), mean=1.0, decay=False)
        self.norm = None if config.mamba_norm == "none" else new_parameter(norm, context)  # [n/tp p]
        self.norms_first = config.mamba_norm == "before_gate"
        self.factors = config.mamba_multipliers
        self.projection = RowParallelLinear(
            spec.width,
            h,
            context,
            bias=bias,
            std=depth_scaled_std(std, config.num_blocks),
            skip_bias_add=True,
        )

    @wrap_point
    def recur(self, projected: Tensor, positions: PositionInfo) -> Tensor:
        """Compute norm((state space(x) + D x) silu(gate)), ``[s, b, n' p]``, of convolved x, B and C.

        Args:
            projected: ``[s, b, g' (2 r p + 2 d + r)]``.
        """
        spec, starts, saved = self.spec, positions.document_starts, self.saved
        inputs, state = (None, None) if saved is None else (saved.inputs, saved.state)
        grouped = projected.unflatten(-1, (-1, sum(spec.group_rows)))  # [s, b, g', ...]
        if self.factors is not None:
            parts = zip(grouped.split(spec.group_rows, dim=-1), self.factors, strict=True)
            grouped = torch.cat([part * factor for part, factor in parts], dim=-1)
        gate, mixed, step = grouped.split((spec.group_rows[0], spec.num_mixed, spec.group_heads), dim=-1)
        convolved, inputs = self.convolution(mixed.flatten(2), starts, inputs)
        x, of_input, of_output = convolved.unflatten(-1, mixed.shape[2:]).split(spec.group_rows[1:4], dim=-1)

        wide = torch.promote_types(projected.dtype, torch.float32)
        own = map(self.exchange.own, (self.A_log, self.dt_bias, self.D))
        A_log, dt_bias, D = (each.to(wide).view(-1, spec.group_heads) for each in own)  # [g', r]
        dt = F.softplus(step.to(wide) + dt_bias).clamp(min=spec.min_time_step)  # [s, b, g', r]
        x = x.unflatten(-1, (spec.group_heads, spec.head_dim))  # [s, b, g', r, p]
        k, q = (each.permute(1, 2, 0, 3) for each in (of_input, of_output))  # [b, g', s, d]
        v, rate = x.permute(1, 2, 3, 0, 4), dt.permute(1, 2, 3, 0)  # [b, g', r, s, p], [b, g', r, s]
        decay = -A_log.exp().unsqueeze(-1) * rate
        recur = chunked_recurrence if self.kernel_problem else recurrence
        y, state = recur(q, k, v, decay, rate, starts, state, is_delta=False)
        if saved is not None:
            saved.keep(inputs, state)
        y = (y.permute(3, 0, 1, 2, 4) + D.unsqueeze(-1) * x).flatten(3)  # [s, b, g', r p]
        if self.norm is None:
            return (y * F.silu(gate.to(wide))).to(gate.dtype).flatten(2)
        weight = self.exchange.own(self.norm).view(-1, spec.group_rows[0])
        return gated_rms_norm(y, gate, weight, self.epsilon, self.norms_first).flatten(2)


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, epsilon: float, norms_first: bool = False
) -> Tensor:
    """Return ``norm(x silu(gate)) weight``, or ``norm(x) weight silu(gate)``, in the gate's dtype.

    The norm is over the last dim.

    Args:
        x: ``[..., n]``, of any precision; sums are in at least fp32.
        gate: ``[..., n]``.
        weight: ``[n]``, or ``[..., n]`` if it differs along other dims.
    """
    wide = torch.promote_types(gate.dtype, torch.float32)
    factor = F.silu(gate.to(wide))
    y = x.to(wide) if norms_first else x.to(wide) * factor
    y = y * (y.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (y * factor if norms_first else y).to(gate.dtype) * weight


def _of_heads(initial: Tensor, context: LayerContext) -> nn.Parameter:
    """Return a parameter with a number for each head, cut over tp."""
    spec = ParameterSpec(tuple(initial.shape), Cut("tp", 0), decay=False, initial=initial)
    return new_parameter(spec, context)


def initial_rates(spec: MambaSpec) -> Tensor:
    """Return the initial decay rates of all heads: the quantiles of the published uniform distribution."""
    low, high = _DECAY_RATES
    return low + (high - low) * (torch.arange(spec.num_heads, dtype=torch.float64) + 0.5) / spec.num_heads


def initial_time_steps(spec: MambaSpec) -> Tensor:
    """Return the initial time steps of all heads, whose logarithms are spread evenly.

    Multiples of the golden ratio spread them over any consecutive heads too, so that they do not grow with
    the decay rates.
    """
    low, high = map(math.log, _TIME_STEPS)
    shares = (torch.arange(spec.num_heads, dtype=torch.float64) + 0.5) * _GOLDEN_RATIO % 1.0
    return (low + (high - low) * shares).exp()
