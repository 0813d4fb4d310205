"""PyTorch's FlexAttention: ALiBi and documents inside the kernel, without a bias in memory.

Not measured: backward requires a GPU (torch 2.13), and we had none.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from megalite.config import ModelConfig
from megalite.kernels import Drop
from megalite.model.attention_core import AttentionCore
from megalite.model.positions import local_slopes, seen_keys
from megalite.tensor_parallel.parameter_spec import LayerContext


class FlexCore(AttentionCore):
    """Computes attention in a kernel that torch.compile generates for the model's positions and documents.

    Args:
        compiled: replacement for the compiled `flex_attention`, for tests on a CPU.
    """

    def __init__(
        self, config: ModelConfig, context: LayerContext, compiled: Callable[..., Tensor] | None = None
    ) -> None:
        super().__init__(config, context)
        self.attend = compiled or torch.compile(flex_attention, dynamic=False)
        self.score_mod = self._alibi(local_slopes(config, context))
        self.causal: dict[int, BlockMask] = {}

    def _alibi(self, slopes: list[float] | None) -> Callable[..., Tensor] | None:
        if slopes is None:
            return None
        head_slopes = torch.tensor(slopes, dtype=torch.float32, device=self.context.device)

        def bias(score: Tensor, b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score + head_slopes[head] * (key - query)

        return bias

    def mask(self, document_ids: Tensor) -> BlockMask:
        """Return the blocks of keys that each block of queries attends to."""
        seen = seen_keys(document_ids, self.config)

        def sees(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            end = query + 1 if seen.ends is None else seen.ends[b, query]
            return (key < end) & (key >= seen.starts[b, query])

        b, s = document_ids.shape
        return create_block_mask(sees, b, None, s, s, device=self.context.device)

    def prepare(self, seq_length: int) -> None:
        """Build the tables; see `AttentionCore`."""
        super().prepare(seq_length)
        self._causal_mask(seq_length)
        # The kernel is a separate graph: inside a layer's graph, after a rotary embedding, its forward
        # computed wrong numbers (torch 2.13 on a CPU).
        self.attend = torch.compiler.disable(self.attend, recursive=False)

    def _causal_mask(self, s: int) -> BlockMask:
        """Return the mask of samples without packed documents, computed at the first call."""

        def sees(b: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return key <= query

        if s not in self.causal:
            self.causal[s] = create_block_mask(sees, None, None, s, s, device=self.context.device)
        return self.causal[s]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None, drop: Drop) -> Tensor:
        """Compute attention; see `LayerCore`."""
        assert drop.p == 0.0, "this backend does not support dropout of attention weights"
        return self.attend(
            q,
            k,
            v,
            score_mod=self.score_mod,
            block_mask=mask or self._causal_mask(q.shape[2]),
            enable_gqa=q.shape[1] != k.shape[1],
        )
