"""Self-attention, with or without latents, over the heads of one tensor-parallel rank.

Multi-latent attention: DeepSeek-AI 2024, arXiv 2405.04434, section 2.1. Keys and values of all heads are
linear functions of one narrow vector per token, the latent. Rotary positions would prevent this, so a part of
each key, which all heads share, is computed from the hidden states and rotated.

Shapes: s sequence, b microbatch, h hidden size, n query heads, g key/value heads, r = n/g, d head size,
tp = tp.size. A rank has n/tp query heads, and g' = max(1, g/tp) key/value heads. With context parallelism,
s is the tokens of a rank outside of the attention core. With latents, c width of the latent of keys and
values, p elements of a query or key without positions, r its rotated elements, d = p + r, v size of a head's
values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megalite.attention.core import StageCore
from megalite.attention.positions import Angles, PositionInfo
from megalite.config import AttentionSpec, ModelConfig, RecomputeConfig
from megalite.config.model.attention import LatentSpec
from megalite.data.microbatch import BlockOutput, SampleNumbers
from megalite.distributed.collectives import (
    all_gather_from,
    copy_to_tensor_parallel,
    gather_from_sequence_parallel,
)
from megalite.kernels.packed_heads import Heads, SplitHeads, split_heads
from megalite.model.norm import HeadRMSNorm, build_head_norm, build_latent_norm
from megalite.model.recompute_region import recompute_core, recompute_output
from megalite.tensor_parallel.counter_random import Dropout
from megalite.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, depth_scaled_std
from megalite.tensor_parallel.parameter_spec import LayerContext, ParameterSpec, new_parameter
from megalite.tensor_parallel.placement import Cut
from megalite.tensor_parallel.uncut_linear import UncutLinear
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
        elif config.qk_layernorm_after_rope:
            self.complete, self.rotated = self._complete_values, self._rotated_and_normed  # type: ignore[method-assign]
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

    def _complete_values(self, q: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        *gate, k, v = others
        return q, *gate, k, self.value_norm(v)

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

    def _rotated_and_normed(
        self, q: Tensor, k: Tensor, v: Tensor, angles: Angles | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.query_norm(self.rotate(q, angles)), self.key_norm(self.rotate(k, angles)), v

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


class LatentAttention(Attention):
    """Computes multi-latent attention; the layer adds the projection's bias.

    Every tensor-parallel rank computes the latents, of its own tokens if sequence parallel. The projections
    from latents to heads are cut over heads. The rows of `key_value_up` are grouped by head, ``[n, p + v]``.
    """

    def build_inputs(self, config: ModelConfig, context: LayerContext) -> None:
        """Build the modules that compute queries, keys and values."""
        spec = self.spec
        assert isinstance(spec, LatentSpec)
        bias = config.has_qkv_bias
        h, std, n = config.hidden_size, config.init_method_std, spec.num_heads
        self.latent_width, self.rotary_dim = spec.latent_width, spec.head_dim - spec.key_dim
        self.key_dim, self.value_dim = spec.key_dim, spec.value_dim
        self.shares_tokens = context.sequence_parallel
        query_width = h if spec.query_width is None else spec.query_width
        self.query_down: nn.Module = nn.Identity()
        self.query_norm: nn.Module = nn.Identity()
        if spec.query_width is not None:
            self.query_down = UncutLinear(h, query_width, context, bias=bias, std=std)
            self.query_norm = build_latent_norm(config, context, query_width)
        self.query_up = ColumnParallelLinear(query_width, n * spec.head_dim, context, bias=False, std=std)
        parts = self.latent_width, self.rotary_dim
        self.key_value_down = UncutLinear(h, sum(parts), context, bias=bias, std=std, fused_rows=parts)
        self.key_value_norm = build_latent_norm(config, context, self.latent_width)
        rows = self.key_dim, self.value_dim
        self.key_value_up = ColumnParallelLinear(
            self.latent_width, n * sum(rows), context, bias=False, std=std, fused_rows=rows
        )

    def recompute_core(self, config: RecomputeConfig) -> None:
        """Let backward also recompute the projections from latents, and keep the latents."""
        if "mla_up_proj" not in config.modules:
            super().recompute_core(config)
            return
        projections: list[Callable[..., tuple[Tensor, ...]]] = []

        def pass_on(project: Callable[..., Any]) -> Callable[..., Any]:
            projections.append(project)
            return lambda *latents: latents

        wrap(self, "from_latents", pass_on)
        (project,) = projections

        def from_latents(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def attend_projected(of_queries: Tensor, shared: Tensor, latent: Tensor, *others: Any) -> Tensor:
                return attend(*project(of_queries, shared, latent), *others)

            return recompute_core(attend_projected)

        wrap(self, "attend", from_latents)

    @communication_point
    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries ``[s, b, n/tp, d]``, and the two parts of keys and values of ``[s, b, h]``.

        The first part is the shared part of the keys, ``[s, b, 1, r]``, before rotation, the second one
        `of_latent`.
        """
        latent, shared = self.key_value_down(x).split((self.latent_width, self.rotary_dim), dim=-1)
        return self.from_latents(self.query_down(x), shared.contiguous(), latent)

    @wrap_point
    def from_latents(self, of_queries: Tensor, shared: Tensor, latent: Tensor) -> tuple[Tensor, ...]:
        """Return `queries_keys_values` of the latents before their norms, and the shared part of the keys."""
        q = self.query_up(self.query_norm(of_queries)).unflatten(-1, (-1, self.spec.head_dim))
        use = gather_from_sequence_parallel if self.shares_tokens else copy_to_tensor_parallel
        return q, use(shared, self.tp).unsqueeze(2), self.of_latent(self.key_value_norm(latent))

    def of_latent(self, latent: Tensor) -> Tensor:
        """Map ``[s, b, c]``, ``[s/tp, b, c]`` if sequence parallel, to ``[s, b, n/tp, p + v]``."""
        y: Tensor = self.key_value_up(latent)
        return y.unflatten(-1, (-1, self.key_dim + self.value_dim))

    def rotated(
        self, q: Tensor, k: Tensor, v: Tensor, angles: Angles | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries and keys, and values, from the result of `queries_keys_values`."""
        keys, values = v.split((self.key_dim, self.value_dim), dim=-1)
        shared = self.rotate(k, angles).expand(*keys.shape[:-1], -1)
        return self.rotated_queries(q, angles), torch.cat((keys, shared), dim=-1), values

    def rotated_queries(self, q: Tensor, angles: Angles | None) -> Tensor:
        """Return queries ``[s, b, n/tp, d]`` whose last r elements are rotated."""
        fixed, turned = q.split((self.key_dim, self.rotary_dim), dim=-1)
        return torch.cat((fixed, self.rotate(turned, angles)), dim=-1)


class CachedLatentAttention(LatentAttention):
    """Computes multi-latent attention for generation: the cache holds latents and shared parts of keys.

    A score is a product of the latent with the query, which the heads' key projection maps to its width. The
    weights sum latents, and the heads' value projection maps the sum to the values.
    """

    def of_latent(self, latent: Tensor) -> Tensor:
        """Return the latents as the values of one head, ``[s, b, 1, c]``."""
        return latent.unsqueeze(2)

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
        """Compute `Attention.attend` in the width of the latent."""
        y = super().attend(q, k, v, sample_numbers, positions)  # [s, b, n/tp, c]
        _, to_values = self._projections()
        return torch.einsum("sbnc,nvc->sbnv", y, to_values)

    def rotated(
        self, q: Tensor, k: Tensor, v: Tensor, angles: Angles | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries ``[s, b, n/tp, c + r]``, keys ``[s, b, 1, c + r]``, and their first c elements."""
        to_keys, _ = self._projections()
        fixed, turned = self.rotated_queries(q, angles).split((self.key_dim, self.rotary_dim), dim=-1)
        queries = torch.cat((torch.einsum("sbnp,npc->sbnc", fixed, to_keys), turned), dim=-1)
        return queries, torch.cat((v, self.rotate(k, angles)), dim=-1), v

    def _projections(self) -> tuple[Tensor, Tensor]:
        """Return the rank's projections from the latent to keys and to values, ``[n/tp, p or v, c]``."""
        rows = self.key_value_up.weight.unflatten(0, (-1, self.key_dim + self.value_dim))
        to_keys, to_values = rows.split((self.key_dim, self.value_dim), dim=1)
        return to_keys, to_values
