"""Self-attention over the heads of one tensor-parallel rank.

Shapes: s sequence, b microbatch, h hidden size, n query heads, g key/value heads, r = n/g, d head size,
tp = tp.size. A rank has n/tp query heads, and g' = max(1, g/tp) key/value heads.
"""

from __future__ import annotations

from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.distributed.collectives import all_gather_from
from megalite.model.attention_core import Core
from megalite.model.positions import PositionInfo
from megalite.tensor_parallel.counter_random import Dropout
from megalite.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, depth_scaled_std
from megalite.tensor_parallel.parameter_spec import LayerContext


class Attention(nn.Module):
    """Computes grouped-query attention (Ainslie et al. 2023), without the bias of the projection.

    r = 1 is multi-head attention, g = 1 multi-query attention. The rows of the fused query/key/value weight
    are grouped by key/value head, ``[g, r + 2, d]``, so that a rank's heads with their keys and values are
    one plain slice. If tp > g, several ranks share a key/value head: the slice is then a part of a group, and
    the ranks all-gather their outputs and select the heads that they need.
    """

    def __init__(self, config: ModelConfig, context: LayerContext, core: Core, layer: int) -> None:
        super().__init__()
        self.tp = context.tp
        self.core = core.for_layer(layer)
        self.head_dim = config.head_dim
        self.num_groups = config.num_kv_heads
        self.heads_per_group = config.num_attention_heads // self.num_groups
        self.local_heads = config.num_attention_heads // self.tp.size
        h, bias, std = config.hidden_size, config.add_bias_linear, config.init_method_std
        qkv_size = self.num_groups * (self.heads_per_group + 2) * self.head_dim
        self.qkv = ColumnParallelLinear(h, qkv_size, context, bias=bias, std=std)
        self.projection = RowParallelLinear(
            config.num_attention_heads * self.head_dim,
            h,
            context,
            bias=bias,
            std=depth_scaled_std(std, config.num_layers),
            skip_bias_add=True,
        )
        self.split = self._split_own_groups if self.tp.size <= self.num_groups else self._split_shared_group
        self.dropout = Dropout(config.attention_dropout, context, f"layers.{layer}.attention.weights")

    def forward(self, x: Tensor, sample_numbers: Tensor, positions: PositionInfo) -> Tensor:
        """Map ``[s, b, h]`` to ``[s, b, h]``, both ``[s/tp, b, h]`` if sequence parallel."""
        q, k, v = self.split(self.qkv(x))  # [s, b, n/tp, d], twice [s, b, g', d]
        y = self.attend(q, k, v, sample_numbers, positions)  # [s, b, n/tp, d]
        return self.projection(y.flatten(2))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, sample_numbers: Tensor, positions: PositionInfo
    ) -> Tensor:
        """Compute dropout(softmax(q k^T / sqrt(d) + bias)) v, after rotary embedding of q and k.

        The shapes are as in `forward`.
        """
        q, k = self.core.rotate(q, positions.angles), self.core.rotate(k, positions.angles)
        q, k, v = (heads.permute(1, 2, 0, 3) for heads in (q, k, v))  # [b, n/tp, s, d], twice [b, g', s, d]
        first_weight = self.tp.rank * self.local_heads * q.shape[2] ** 2
        drop = self.dropout.of_weights(sample_numbers, first_weight)
        return self.core(q, k, v, positions.mask, drop).permute(2, 0, 1, 3)

    def _split_own_groups(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split ``[s, b, g/tp (r + 2) d]`` into queries, keys and values of this rank's g/tp groups.

        Tokens are flattened to one dim for the split: its gradient is a cat, and PyTorch's cat on CUDA is one
        kernel for at most 4 dims, but one copy per part for 5.
        """
        tokens = qkv.shape[:2]
        grouped = qkv.flatten(0, 1).unflatten(-1, (-1, self.heads_per_group + 2, self.head_dim))
        q, k, v = grouped.split((self.heads_per_group, 1, 1), dim=-2)  # [s b, g/tp, r, d], twice [.., 1, d]
        q, k, v = (part.flatten(1, 2).unflatten(0, tokens) for part in (q, k, v))
        return q, k, v

    def _split_shared_group(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split ``[s, b, g (r + 2) d / tp]`` into this rank's queries and its shared keys and values."""
        ranks_per_group = self.tp.size // self.num_groups
        group, member = divmod(self.tp.rank, ranks_per_group)
        full = all_gather_from(qkv, self.tp)  # [s, b, g (r + 2) d]
        own_group = full.unflatten(-1, (self.num_groups, -1, self.head_dim))[:, :, group]  # [s, b, r + 2, d]
        q, k, v = own_group.split((self.heads_per_group, 1, 1), dim=-2)
        return q.narrow(2, member * self.local_heads, self.local_heads), k, v
