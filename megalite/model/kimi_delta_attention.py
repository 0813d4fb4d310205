"""Kimi Delta Attention, Gated DeltaNet with a decay for each element of a key (arXiv 2510.26692).

Shapes: s sequence, b microbatch, h hidden size, n heads, d size of a head, tp = tp.size. A rank has n/tp of
the heads, and computes n' of them, all without context parallelism.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.attention.core import StageCore
from megalite.attention.positions import PositionInfo
from megalite.config import ModelConfig
from megalite.config.model.recurrence import KimiDeltaSpec
from megalite.model.gated_delta_net import GatedNorm, decay_rates, normalized
from megalite.model.recurrent_mixer import RecurrentMixer, ShortConvolution, chunked_recurrence
from megalite.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, depth_scaled_std
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterSpec, new_parameter
from megalite.tensor_parallel.placement import Cut
from megalite.tensor_parallel.uncut_linear import UncutLinear
from megalite.utils.wrapping import communication_point, wrap_point

_CHUNK = 16
"""Tokens of a chunk, of which every pair has d factors."""


class KimiDeltaAttention(RecurrentMixer):
    """Computes the delta rule with a decay for each element of keys; no bias.

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
            chunk=_CHUNK,
            is_delta=True,
        )
        if saved is not None:
            saved.keep(inputs, state)
        y = y.squeeze(2).permute(2, 0, 1, 3).to(projected.dtype)  # [s, b, n', d]
        return self.norm(y, gate).flatten(2)
