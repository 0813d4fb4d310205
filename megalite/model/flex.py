"""PyTorch's FlexAttention: ALiBi and documents inside the kernel, without a bias in memory.

Not measured: it has a backward on GPUs alone (torch 2.13), and none was there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from megalite.config import ModelConfig
from megalite.kernels import Drop
from megalite.model.attention_core import AttentionCore
from megalite.model.positions import document_starts, local_slopes
from megalite.parallel.shard import Placement


class FlexCore(AttentionCore):
    """The product by a kernel that torch.compile makes for this model's positions and documents."""

    def __init__(
        self, config: ModelConfig, place: Placement, compiled: Callable[..., Tensor] | None = None
    ) -> None:
        """Takes what runs in the place of a compiled `flex_attention`, for tests on a CPU."""
        super().__init__(config, place)
        self.attend = compiled or torch.compile(flex_attention, dynamic=False)
        self.score_mod = self._alibi(local_slopes(config, place))
        self.causal: dict[int, BlockMask] = {}

    def _alibi(self, slopes: list[float] | None) -> Callable[..., Tensor] | None:
        if slopes is None:
            return None
        of_heads = torch.tensor(slopes, dtype=torch.float32, device=self.place.device)

        def bias(score: Tensor, b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score + of_heads[head] * (key - query)

        return bias

    def mask(self, document_ids: Tensor) -> BlockMask:
        """Which blocks of keys have something for a block of queries, and what."""
        starts = document_starts(document_ids)

        def sees(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (key >= starts[b, query])

        b, s = document_ids.shape
        return create_block_mask(sees, b, None, s, s, device=self.place.device)

    def prepare(self, seq_length: int) -> None:
        """As `AttentionCore`; the kernel stays a graph of its own.

        Within a layer's graph it gave other numbers after a rotation (torch 2.13 on a CPU, forward).
        """
        super().prepare(seq_length)
        self._of_whole_samples(seq_length)
        self.attend = torch.compiler.disable(self.attend, recursive=False)

    def _of_whole_samples(self, s: int) -> BlockMask:
        """The causal order alone, made at its first use."""

        def sees(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return key <= query

        if s not in self.causal:
            self.causal[s] = create_block_mask(sees, None, None, s, s, device=self.place.device)
        return self.causal[s]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, drop: Drop) -> Tensor:
        """As `LayerCore`."""
        assert drop.p == 0.0, "chosen for a model without dropout of attention weights"
        return self.attend(
            q,
            k,
            v,
            score_mod=self.score_mod,
            block_mask=mask or self._of_whole_samples(q.shape[2]),
            enable_gqa=q.shape[1] != k.shape[1],
        )
