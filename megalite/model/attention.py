"""Causal self-attention over the heads of one tensor-parallel rank.

Shapes: s sequence, b microbatch, h hidden size, n query heads, g key/value heads, r = n/g, d head size,
t = tp.size. A full ``[n]`` is written n, this rank's part n/t.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.model.attention_core import Core
from megalite.model.positions import Places
from megalite.parallel.collectives import gather_from
from megalite.parallel.linear import ColumnParallelLinear, RowParallelLinear, depth_scaled_std
from megalite.parallel.recompute import compute, recompute
from megalite.parallel.rng import Dropout
from megalite.parallel.shard import Placement


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023); r = 1 is multi-head, g = 1 multi-query.

    The rows of the fused query/key/value weight are grouped by key/value head, ``[g, r + 2, d]``: a rank's
    heads with their keys and values are one plain slice of it. Where t > g several ranks share a key/value
    head: the slice then is a part of a group, and the ranks gather their outputs and take what they need.
    """

    def __init__(
        self,
        config: ModelConfig,
        place: Placement,
        core: Core,
        layer: int,
        seed: int,
        recomputed: Collection[str] = frozenset(),
    ) -> None:
        super().__init__()
        self.tp = place.tp
        self.core = core.of_layer(layer)
        self.run = recompute if "core_attn" in recomputed else compute
        self.head_dim = config.head_dim
        self.num_groups = config.num_kv_heads
        self.heads_per_group = config.num_attention_heads // self.num_groups
        self.local_heads = config.num_attention_heads // self.tp.size
        qkv_size = self.num_groups * (self.heads_per_group + 2) * self.head_dim
        bias, std = config.add_bias_linear, config.init_method_std
        self.qkv = ColumnParallelLinear(config.hidden_size, (qkv_size,), place, bias=bias, std=std)
        self.projection = RowParallelLinear(
            config.num_attention_heads * self.head_dim,
            config.hidden_size,
            place,
            bias=bias,
            std=depth_scaled_std(std, config.num_layers),
            adds_bias=False,
        )
        self.split = self._split_own_groups if self.tp.size <= self.num_groups else self._split_shared_group
        self.dropout = Dropout(config.attention_dropout, seed, f"layers.{layer}.attention.weights")

    def forward(self, x: Tensor, sample_numbers: Tensor, places: Places) -> Tensor:
        """``[s, b, h]`` -> ``[s, b, h]`` without the last bias, both ``[s/t, b, h]`` if sequence parallel."""

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k = self.core.rotate(q, places.angles), self.core.rotate(k, places.angles)
            q, k, v = (part.permute(1, 2, 0, 3) for part in (q, k, v))  # [b, n/t, s, d]
            first_weight = self.tp.rank * self.local_heads * q.shape[2] ** 2
            drop = self.dropout.of_weights(sample_numbers, first_weight)
            return self.core(q, k, v, places.mask, drop).permute(2, 0, 1, 3)

        y = self.run(attend, *self.split(self.qkv(x)))  # [s, b, n/t, d]
        return self.projection(y.flatten(2))

    def _split_own_groups(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``[s, b, g/t (r + 2) d]`` -> queries, keys and values of this rank's g/t groups."""
        grouped = qkv.unflatten(-1, (-1, self.heads_per_group + 2, self.head_dim))  # [s, b, g/t, r + 2, d]
        q, k, v = grouped.split((self.heads_per_group, 1, 1), dim=-2)
        return q.flatten(2, 3), k.squeeze(3), v.squeeze(3)

    def _split_shared_group(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``[s, b, g (r + 2) d / t]`` -> this rank's queries, and the keys and values that it shares."""
        ranks_per_group = self.tp.size // self.num_groups
        group, member = divmod(self.tp.rank, ranks_per_group)
        whole = gather_from(qkv, self.tp).unflatten(-1, (self.num_groups, -1, self.head_dim))[:, :, group]
        q, k, v = whole.split((self.heads_per_group, 1, 1), dim=-2)  # [s, b, r, d], twice [s, b, 1, d]
        return q.narrow(2, member * self.local_heads, self.local_heads), k, v
