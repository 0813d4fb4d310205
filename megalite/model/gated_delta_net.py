"""Gated DeltaNet (Qwen3-Next, Qwen3.5), and Kimi Delta Attention, with a decay for each element of a key.

Shapes: s sequence, b microbatch, h hidden size, g query and key heads, r value heads that share one, n = g r
value heads, d size of a key head, e size of a value head, tp = tp.size. A rank has g/tp of the key heads, and
computes g' of them, all without context parallelism, with their n' value heads. In `KimiDeltaAttention`,
there are n heads, d is the size of each, and a rank computes n' of its n/tp.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.attention.core import StageCore
from megalite.attention.positions import PositionInfo
from megalite.config import ModelConfig
from megalite.config.model.recurrence import DeltaNetSpec, KimiDeltaSpec
from megalite.kernels import recurrence, recurrence_problem, rms_norm_on
from megalite.model.recurrent_mixer import RecurrentMixer, ShortConvolution, chunked_recurrence
from megalite.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, depth_scaled_std
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterSpec, new_parameter
from megalite.tensor_parallel.placement import Cut
from megalite.tensor_parallel.uncut_linear import UncutLinear
from megalite.utils.wrapping import communication_point, wrap_point

_LARGEST_DECAY = 16.0
"""Largest initial exp(A_log)."""
_EPSILON = 1e-6
"""Number added to the squared lengths of queries and keys, so that none is 0."""


class GatedDeltaNet(RecurrentMixer):
    """Computes the gated delta rule of a sample's tokens (Yang et al. 2024, arXiv 2412.06464); no bias.

    `DeltaNetSpec.group_rows` lists the rows of the input projection for a key head.
    """

    def __init__(
        self, config: ModelConfig, context: LayerContext, core: StageCore, layer: int, spec: DeltaNetSpec
    ) -> None:
        super().__init__(context)
        self.spec = spec
        self.saved = core.recurrent_state(layer)
        heads = spec.key_dim, spec.value_dim
        self.kernel_problem = recurrence_problem(context.device, context.dtype, *heads)
        h, std = config.hidden_size, config.init_method_std
        self.in_projection = ColumnParallelLinear(
            h,
            spec.key_heads * sum(spec.group_rows),
            context,
            bias=False,
            std=std,
            fused_rows=spec.group_rows,
        )
        self.convolution = ShortConvolution(spec.key_heads * spec.num_mixed, spec.kernel, std, context)
        n = spec.value_heads
        self.A_log = decay_rates(n, context)  # [n/tp]
        self.dt_bias = new_parameter(ParameterSpec((n,), Cut("tp", 0), mean=1.0, decay=False), context)
        self.largest_rate = 2.0 if config.linear_allow_neg_eigval else 1.0
        epsilon = config.norm_epsilon if config.linear_norm_epsilon is None else config.linear_norm_epsilon
        self.norm = GatedNorm(spec.value_dim, epsilon, context)
        self.projection = RowParallelLinear(
            n * spec.value_dim, h, context, bias=False, std=depth_scaled_std(std, config.num_blocks)
        )

    @wrap_point
    def recur(self, projected: Tensor, positions: PositionInfo) -> Tensor:
        """Compute norm(delta rule(convolution(q, k, v))) * silu(gate), ``[s, b, n' e]``.

        Args:
            projected: ``[s, b, g' (2 d + 2 r e + 2 r)]``.
        """
        spec, starts, saved = self.spec, positions.document_starts, self.saved
        grouped = projected.unflatten(-1, (-1, sum(spec.group_rows)))  # [s, b, g', ...]
        qkv, gate, rate, step = grouped.split((spec.num_mixed, *spec.group_rows[3:]), dim=-1)
        mixed, inputs = self.convolution(qkv.flatten(2), starts, None if saved is None else saved.inputs)
        q, k, v = mixed.unflatten(-1, qkv.shape[2:]).split(spec.group_rows[:3], dim=-1)

        wide = torch.promote_types(projected.dtype, torch.float32)
        q, k = (normalized(each.to(wide)).permute(1, 2, 0, 3) for each in (q, k))  # [b, g', s, d]
        v = v.unflatten(-1, (-1, spec.value_dim)).permute(1, 2, 3, 0, 4)  # [b, g', r, s, e]
        own = map(self.exchange.own, (self.A_log, self.dt_bias))
        A_log, dt_bias = (each.to(wide).view(-1, spec.sharers) for each in own)  # [g', r]
        decay = -A_log.exp() * F.softplus(step.to(wide) + dt_bias)  # [s, b, g', r]
        rate = self.largest_rate * rate.to(wide).sigmoid()
        decay, rate = (each.permute(1, 2, 3, 0) for each in (decay, rate))
        q = q * spec.key_dim**-0.5
        state = None if saved is None else saved.state
        if self.kernel_problem:
            y, state = chunked_recurrence(q, k, v, decay, rate, starts, state, is_delta=True)
        else:
            q, k = (each.to(projected.dtype) for each in (q, k))
            y, state = recurrence(q, k, v, decay, rate, starts, state, is_delta=True)
        if saved is not None:
            saved.keep(inputs, state)
        y = y.permute(3, 0, 1, 2, 4).flatten(2, 3).to(projected.dtype)  # [s, b, n', e]
        return self.norm(y, gate.unflatten(-1, (-1, spec.value_dim)).flatten(2, 3)).flatten(2)


class GatedNorm(nn.Module):
    """Computes RMSNorm(x) * weight * f(gate) over each value head; all heads share the weight.

    Args:
        function: f.
    """

    def __init__(
        self,
        size: int,
        epsilon: float,
        context: LayerContext,
        function: Callable[[Tensor], Tensor] = F.silu,
    ) -> None:
        super().__init__()
        self.epsilon, self.function = epsilon, function
        spec = ParameterSpec((size,), mean=1.0, decay=False)
        self.weight = new_parameter(spec, context, used_by_cut_heads=True)  # [e]
        self.normalize = rms_norm_on(context.device.type).alone

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalize ``[s, b, n', e]`` and multiply it by its gate, of the same shape."""
        normed = self.normalize(x, self.weight, self.epsilon)
        wide = torch.promote_types(x.dtype, torch.float32)
        return (normed * self.function(gate.to(wide))).to(x.dtype)


def decay_rates(n: int, context: LayerContext) -> nn.Parameter:
    """Return the logarithms of the decay rates of n heads.

    The published initial rates are uniform in (0, 16); these are that distribution's n quantiles.
    """
    rates = (torch.arange(n, dtype=torch.float64) + 0.5) * (_LARGEST_DECAY / n)
    return new_parameter(ParameterSpec((n,), Cut("tp", 0), decay=False, initial=rates.log()), context)


def normalized(x: Tensor) -> Tensor:
    """Divide vectors along the last dim by their length."""
    return x * (x.square().sum(-1, keepdim=True) + _EPSILON).rsqrt()


_KIMI_CHUNK = 16
"""Tokens of a chunk, of which every pair has d factors."""


class KimiDeltaAttention(RecurrentMixer):
    """Computes the delta rule with a decay for each element of keys (arXiv 2510.26692); no bias.

    Decays and gates are projections of vectors as wide as a head, which all heads share.
    """

    kernel_problem = "a decay for each element of keys"

    def __init__(
        self, config: ModelConfig, context: LayerContext, core: StageCore, layer: int, spec: KimiDeltaSpec
    ) -> None:
        super().__init__(context)
        self.spec, self.saved = spec, core.recurrent_state(layer)
        h, d, n, std = config.hidden_size, spec.head_dim, spec.num_heads, config.init_method_std
        rows = spec.group_rows
        self.in_projection = ColumnParallelLinear(
            h, n * sum(rows), context, bias=False, std=std, fused_rows=rows
        )
        self.decay_down, self.gate_down = (UncutLinear(h, d, context, std=std) for _ in range(2))
        self.decay_up, self.gate_up = (
            ColumnParallelLinear(d, n * d, context, bias=False, std=std) for _ in range(2)
        )
        self.convolution = ShortConvolution(3 * n * d, spec.kernel, std, context)
        self.A_log = decay_rates(n, context)  # [n/tp]
        self.dt_bias = new_parameter(  # [n/tp d]
            ParameterSpec((n * d,), Cut("tp", 0), mean=1.0, decay=False), context
        )
        self.norm = GatedNorm(d, config.norm_epsilon, context, torch.sigmoid)
        self.projection = RowParallelLinear(
            n * d, h, context, bias=False, std=depth_scaled_std(std, config.num_blocks)
        )

    @communication_point
    def project_in(self, x: Tensor, positions: PositionInfo) -> Tensor:
        """Map ``[s, b, h]`` to the features of this rank's heads for all tokens, ``[s, b, n' (5 d + 1)]``."""
        decay, gate = self.decay_up(self.decay_down(x)), self.gate_up(self.gate_down(x))
        features = self.in_projection(x).unflatten(-1, (-1, sum(self.spec.group_rows)))
        others = (each.unflatten(-1, (-1, self.spec.head_dim)) for each in (decay, gate))
        return self.exchange.to_heads(torch.cat((features, *others), dim=-1).flatten(2), positions)

    @wrap_point
    def recur(self, projected: Tensor, positions: PositionInfo) -> Tensor:
        """Compute norm(delta rule(convolution(q, k, v))) * sigmoid(gate), ``[s, b, n' d]``.

        Args:
            projected: ``[s, b, n' (5 d + 1)]``.
        """
        d, saved = self.spec.head_dim, self.saved
        inputs, state = (None, None) if saved is None else (saved.inputs, saved.state)
        grouped = projected.unflatten(-1, (-1, 5 * d + 1))  # [s, b, n', ...]
        qkv, rate, step, gate = grouped.split((3 * d, 1, d, d), dim=-1)
        mixed, inputs = self.convolution(qkv.flatten(2), positions.document_starts, inputs)
        q, k, v = mixed.unflatten(-1, qkv.shape[2:]).split(d, dim=-1)

        wide = torch.promote_types(projected.dtype, torch.float32)
        q, k = (normalized(each.to(wide)).permute(1, 2, 0, 3) for each in (q, k))  # [b, n', s, d]
        A_log, dt_bias = (self.exchange.own(each).to(wide) for each in (self.A_log, self.dt_bias))
        decay = -A_log.exp().unsqueeze(-1) * F.softplus(step.to(wide) + dt_bias.view(-1, d))  # [s, b, n', d]
        v, decay, rate = (each.permute(1, 2, 0, 3).unsqueeze(2) for each in (v, decay, rate.to(wide)))
        y, state = chunked_recurrence(
            *(q * d**-0.5, k, v, decay, rate.squeeze(-1).sigmoid(), positions.document_starts, state),
            chunk=_KIMI_CHUNK,
            is_delta=True,
        )
        if saved is not None:
            saved.keep(inputs, state)
        y = y.squeeze(2).permute(2, 0, 1, 3).to(projected.dtype)  # [s, b, n', d]
        return self.norm(y, gate).flatten(2)
