"""Causal self-attention over the heads of one tensor-parallel rank.

Shapes: s sequence, b microbatch, h hidden size, n query heads, g key/value heads, r = n/g, d head size,
t = tp.size. A full ``[n]`` is written n, this rank's part n/t.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.model.documents import Documents
from megalite.model.positions import (
    WHOLE_SAMPLES,
    Angles,
    NoRotation,
    Places,
    Rotary,
    alibi_bias,
    causal_bias,
    within_documents,
)
from megalite.parallel.collectives import gather_from
from megalite.parallel.layers import ColumnParallelLinear, RowParallelLinear, depth_scaled_std
from megalite.parallel.recompute import compute, recompute
from megalite.parallel.rng import Dropout
from megalite.parallel.shard import Placement

BIASES: dict[str, Callable[..., Tensor]] = {"alibi": alibi_bias}
"""Position embeddings that enter as a bias on the scores; the others need the causal mask alone."""

ROTATIONS: dict[str, type[Rotary]] = {"rope": Rotary}
"""Position embeddings that turn queries and keys."""


Drop = Callable[[Tensor], Tensor]


class LayerCore(Protocol):
    """The attention product as one layer calls it."""

    @property
    def rotate(self) -> Callable[[Tensor, Angles | None], Tensor]: ...

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, drop: Drop) -> Tensor: ...


class Core(Protocol):
    """The attention product of all layers of a stage."""

    def places(self, documents: Documents | None) -> Places: ...

    def of_layer(self, layer: int) -> LayerCore: ...


class AttentionCore:
    """softmax(q k^T / sqrt(d) + bias) v; one object serves all layers: its tables exist once."""

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        self.config = config
        self.place = place
        self.has_bias = config.position_embedding_type in BIASES
        self.build_bias = BIASES.get(config.position_embedding_type, causal_bias)
        self.rotate = ROTATIONS.get(config.position_embedding_type, NoRotation)(config, place)
        self.biases: dict[int, Tensor] = {}

    def bias(self, seq_length: int) -> Tensor:
        """The additive mask, ``[n/t or 1, s, s]``, made at its first use."""
        if seq_length not in self.biases:
            self.biases[seq_length] = self.build_bias(self.config, self.place, seq_length)
        return self.biases[seq_length]

    def places(self, documents: Documents | None) -> Places:
        """Where a microbatch's tokens stand: made once for all layers, and only for packed samples."""
        if documents is None:
            return WHOLE_SAMPLES
        ids, positions = documents.document_ids, documents.position_ids
        return Places(
            bias=None if ids is None else within_documents(self.bias(ids.shape[1]), ids),
            angles=None if positions is None else self.rotate.at(positions),
        )


class FusedCore(AttentionCore):
    """PyTorch's scaled_dot_product_attention: no scores in memory, so no dropout on them by our counters."""

    def of_layer(self, layer: int) -> FusedCore:
        """What a layer calls: itself, which keeps nothing of a layer's own."""
        return self

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, drop: Drop) -> Tensor:
        """``[b, n/t, s, d]`` and twice ``[b, g', s, d]`` -> ``[b, n/t, s, d]``, by `Places.bias`."""
        mask = self.bias(q.shape[-2]) if bias is None and self.has_bias else bias
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )


class PlainCore(AttentionCore):
    """The product written out, for dropout on the attention weights."""

    def of_layer(self, layer: int) -> PlainCore:
        """What a layer calls: itself, which keeps nothing of a layer's own."""
        return self

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, drop: Drop) -> Tensor:
        """``[b, n/t, s, d]`` and twice ``[b, g', s, d]`` -> ``[b, n/t, s, d]``, by `Places.bias`."""
        repeats = q.shape[1] // k.shape[1]
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        scores = (q * (1.0 / math.sqrt(q.shape[-1]))) @ k.transpose(-2, -1)  # [b, n/t, s, s]
        bias = self.bias(q.shape[-2]) if bias is None else bias
        weights = torch.softmax(scores.add_(bias), dim=-1)
        return drop(weights) @ v


def build_core(config: ModelConfig, place: Placement) -> FusedCore | PlainCore:
    """The attention product that the config can have."""
    return (PlainCore if config.attention_dropout > 0.0 else FusedCore)(config, place)


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
        )
        self.split = self._split_own_groups if self.tp.size <= self.num_groups else self._split_shared_group
        self.dropout = Dropout(config.attention_dropout, seed, f"layers.{layer}.attention.weights")

    def forward(self, x: Tensor, sample_numbers: Tensor, places: Places) -> Tensor:
        """``[s, b, h]`` -> ``[s, b, h]``, both ``[s/t, b, h]`` if sequence parallel."""

        def drop(weights: Tensor) -> Tensor:  # [b, n/t, s, s]
            base = self.tp.rank * weights[0].numel()
            return self.dropout(weights[None], sample_numbers, base)[0]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k = self.core.rotate(q, places.angles), self.core.rotate(k, places.angles)
            q, k, v = (part.permute(1, 2, 0, 3) for part in (q, k, v))  # [b, n/t, s, d]
            return self.core(q, k, v, places.bias, drop).permute(2, 0, 1, 3)

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
