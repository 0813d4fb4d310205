"""Multi-latent attention (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1).

Keys and values of all heads are linear functions of one narrow vector per token, the latent. Rotary positions
would prevent this, so a part of each key, which all heads share, is computed from the hidden states and
rotated.

Shapes: s sequence, b microbatch, h hidden size, n query heads, c width of the latent of keys and values, p
elements of a query or key without positions, r its rotated elements, d = p + r, v size of a head's values,
tp = tp.size. With context parallelism, s is the tokens of a rank outside of the attention core.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megalite.attention.positions import Angles, PositionInfo
from megalite.config import ModelConfig, RecomputeConfig
from megalite.config.model.attention import LatentSpec
from megalite.data.batch.microbatch import SampleNumbers
from megalite.distributed.collectives import copy_to_tensor_parallel, gather_from_sequence_parallel
from megalite.model.attention import Attention
from megalite.model.norm import build_latent_norm
from megalite.model.recompute_region import recompute_core
from megalite.tensor_parallel.linear import ColumnParallelLinear
from megalite.tensor_parallel.parameter_spec import LayerContext
from megalite.tensor_parallel.uncut_linear import UncutLinear
from megalite.utils.wrapping import communication_point, wrap, wrap_point


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
