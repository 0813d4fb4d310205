"""Self-attention over the heads of one tensor-parallel rank.

Shapes: s sequence, b microbatch, h hidden size, n query heads, g key/value heads, r = n/g, d head size,
tp = tp.size. A rank has n/tp query heads, and g' = max(1, g/tp) key/value heads. With context parallelism,
s is the tokens of a rank outside of the attention core.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from megalite.attention.core import StageCore
from megalite.attention.positions import Angles, PositionInfo
from megalite.config import AttentionSpec, ModelConfig, RecomputeConfig
from megalite.data.batch.microbatch import BlockOutput, SampleNumbers
from megalite.distributed.collectives import all_gather_from
from megalite.kernels.packed_heads import Heads, SplitHeads, split_heads
from megalite.model.norm import HeadRMSNorm, build_head_norm
from megalite.model.recompute_region import recompute_core, recompute_output
from megalite.tensor_parallel.counter_random import Dropout
from megalite.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, depth_scaled_std
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterSpec, new_parameter
from megalite.tensor_parallel.placement import Cut
from megalite.utils.wrapping import communication_point, wrap, wrap_point


class Attention(nn.Module):
    """Computes grouped-query attention (Ainslie et al. 2023); the layer adds the projection's bias.

    r = 1 is multi-head attention, g = 1 multi-query attention. The rows of the fused query/key/value weight
    are grouped by key/value head, ``[g, r + 2, d]``, so that a rank's heads with their keys and values are
    one plain slice. With --attention-output-gate, r gates follow the queries of a group, ``[g, 2 r + 2, d]``.
    If tp > g, several ranks share a key/value head: the slice is then a part of a group, and the ranks
    all-gather their outputs and select the heads that they need.

    A layer whose keys are its values has no rows of values. A layer that attends to keys and values of an
    earlier layer has only rows of queries, and of gates, in the order of the query heads.
    """

    def __init__(
        self, config: ModelConfig, context: LayerContext, core: StageCore, layer: int, spec: AttentionSpec
    ) -> None:
        super().__init__()
        self.tp = context.tp
        self.num_ring_ranks = 1 if context.ring is None else context.ring.size
        self.head_slice = context.attention_heads
        self.core = core.for_layer(layer, spec)
        self.number, self.spec = layer, spec
        self.rotate = _unchanged if spec.rotary is None else core.rotations[spec.rotary]
        self.rotation_index = None if spec.rotary is None else [*core.rotations].index(spec.rotary)
        self.local_heads = spec.num_heads // self.tp.size
        self.build_inputs(config, context)
        self.sinks: Tensor | None = None  # logits of this rank's query heads, [n/tp]
        if config.softmax_type == "learnable":
            learned = ParameterSpec((spec.num_heads,), Cut("tp", 0), std=config.init_method_std, decay=False)
            self.sinks = new_parameter(learned, context)
        elif config.softmax_type == "off-by-one":  # logits of 0 add 1 to each sum (Miller 2023)
            self.sinks = torch.zeros(self.local_heads, dtype=context.dtype, device=context.device)
        self.projection = RowParallelLinear(
            spec.num_heads * spec.value_dim,
            config.hidden_size,
            context,
            bias=config.has_attention_output_bias,
            std=depth_scaled_std(config.init_method_std, config.num_blocks),
            skip_bias_add=True,
            width_ratio=config.width_ratio,
        )
        self.dropout = Dropout(config.attention_dropout, context, f"layers.{layer}.attention.weights")

    def build_inputs(self, config: ModelConfig, context: LayerContext) -> None:
        """Build the modules that compute queries, keys and values."""
        spec = self.spec
        self.group_heads = spec.group_heads
        group_rows = tuple(count * spec.head_dim for count in self.group_heads)
        self.qkv = ColumnParallelLinear(
            config.hidden_size,
            spec.num_groups * sum(group_rows),
            context,
            bias=config.has_qkv_bias,
            std=config.init_method_std,
            fused_rows=group_rows,
            width_ratio=config.width_ratio,
        )
        self.query_norm = build_head_norm(config, context, spec.num_heads, spec.head_dim)
        if spec.key_source is None:
            self.key_norm = build_head_norm(config, context, spec.num_groups, spec.head_dim)
            self.value_norm = HeadRMSNorm(config.norm_epsilon) if config.value_layernorm else nn.Identity()
        bound = config.clip_qkv
        self.clip = _unchanged if bound is None else partial(torch.clamp, min=-bound, max=bound)
        self.complete = self._complete_all
        if spec.key_source is not None:
            self.complete = self._complete_queries
        elif spec.keys_as_values:
            self.complete = self._complete_keys_as_values
        self.split = self._split_own_groups if self.tp.size <= spec.num_groups else self._split_shared_group

    def recompute_parts(self, config: RecomputeConfig, norm: nn.Module) -> None:
        """Let backward recompute attention between the projections, and the norm of the input."""
        self.recompute_core(config)
        if "layernorm" in config.modules:
            recompute_output(norm, "forward", self, "queries_keys_values")

    def recompute_core(self, config: RecomputeConfig) -> None:
        """Let backward recompute attention between the projections."""
        if "core_attn" in config.modules:
            wrap(self, "attend", recompute_core)

    def forward(
        self, x: Tensor, sample_numbers: SampleNumbers, positions: PositionInfo, *keys: Tensor
    ) -> BlockOutput:
        """Map ``[s, b, h]`` to ``[s, b, h]``, both ``[s/tp, b, h]`` if sequence parallel.

        Args:
            keys: keys and values of an earlier layer, if the layer has none of its own.
        """
        # q and the gate are [s, b, n/tp, d], k and v are [s, b, g', d]
        q, *gate, k, v = *self.queries_keys_values(x), *keys
        y = self.attend(q, k, v, sample_numbers, positions, *gate)  # [s, b, n/tp, d]
        for_later = {self.number: (k, v)} if self.spec.gives_keys else {}
        return BlockOutput(self.projection(y.flatten(2)), self.projection.bias, keys=for_later)

    @communication_point
    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return this rank's queries, their gates if there are gates, keys and values of ``[s, b, h]``.

        The shapes are as in `forward`. A layer that attends to keys of an earlier one returns no keys.
        """
        return self.complete(*self.split(self.qkv(x)))

    def _complete_all(self, q: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        *gate, k, v = others
        return *self._complete_queries(q, *gate), self.clip(self.key_norm(k)), self.clip(self.value_norm(v))

    def _complete_keys_as_values(self, q: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        return self._complete_all(q, *others, others[-1])

    def _complete_queries(self, q: Tensor, *gate: Tensor) -> tuple[Tensor, ...]:
        return self.clip(self.query_norm(q)), *gate

    @wrap_point
    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sample_numbers: SampleNumbers,
        positions: PositionInfo,
        gate: Tensor | None = None,
    ) -> Tensor:
        """Compute dropout(softmax(scale q k^T + bias)) v, after rotary embedding of q and k.

        With a gate, the result is multiplied by its sigmoid (Qiu et al. 2025, arXiv 2505.06708). The shapes
        are as in `forward`.
        """
        q, k, v = self.rotated(q, k, v, self.angles(positions))
        if positions.query_factors is not None:
            q = q * positions.query_factors
        q, k, v = self.reach_keys(q, k, v)
        q, k, v = (heads.permute(1, 2, 0, 3) for heads in (q, k, v))  # [b, n/tp, s, d], twice [b, g', s, d]
        s = k.shape[2] * self.num_ring_ranks
        first_weight = self.head_slice.index * q.shape[1] * s**2
        drop = self.dropout.attention_drop(sample_numbers, first_weight)
        y = self.core(q, k, v, positions.visible[self.spec.window], drop, self.sinks)
        y = self.keep_own_tokens(y.permute(2, 0, 1, 3))  # [s, b, n/tp, d]
        return y if gate is None else y * gate.sigmoid()

    def angles(self, positions: PositionInfo) -> Angles | None:
        """Return the layer's angles; None for positions within the sample, or without rotation."""
        if positions.angles is None or self.rotation_index is None:
            return None
        return positions.angles[self.rotation_index]

    def rotated(
        self, q: Tensor, k: Tensor, v: Tensor, angles: Angles | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, of which the first two are rotated by their positions."""
        return self.rotate(q, angles), self.rotate(k, angles), v

    @communication_point
    def reach_keys(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the attention core's arguments from this rank's tokens; see `KeyAccess`."""
        return self.core.enter(q, k, v)

    @communication_point
    def keep_own_tokens(self, y: Tensor) -> Tensor:
        """Return all heads of this rank's tokens from the attention core's output; see `KeyAccess`."""
        return self.core.leave(y)

    def _split_own_groups(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """Split ``[s, b, g/tp (r + 2) d]`` into the queries, gates, keys and values of g/tp groups."""
        packed = qkv.unflatten(-1, (-1, sum(self.group_heads), self.spec.head_dim))
        if self.group_heads[1:] != (1, 1):
            return tuple(heads.flatten(2, 3) for heads in packed.split(self.group_heads, dim=3))
        if torch.compiler.is_compiling():
            return split_heads(packed)  # the compiler derives its backward, and may fuse it
        heads: Heads = SplitHeads.apply(packed)
        return heads

    def _split_shared_group(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """Split ``[s, b, g (r + 2) d / tp]`` into this rank's queries, gates, and shared keys and values."""
        ranks_per_group = self.tp.size // self.spec.num_groups
        group, member = divmod(self.tp.rank, ranks_per_group)
        full = all_gather_from(qkv, self.tp)  # [s, b, g (r + 2) d]
        by_group = full.unflatten(-1, (self.spec.num_groups, -1, self.spec.head_dim))
        parts = by_group[:, :, group].split(self.group_heads, dim=-2)  # of [s, b, r + 2, d]
        num_query_parts = 2 if self.spec.has_gate else 1
        first = member * self.local_heads
        of_queries = (heads.narrow(2, first, self.local_heads) for heads in parts[:num_query_parts])
        return *of_queries, *parts[num_query_parts:]


def _unchanged(x: Tensor, angles: Angles | None = None) -> Tensor:
    return x
