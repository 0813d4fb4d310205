"""The attention core that is written out, which serves every case.

Shapes: s sequence, b microbatch, n query heads of this rank, d head size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megalite.config import ModelConfig
from megalite.kernels import CausalSoftmax, Drop
from megalite.model.attention_core import AttentionCore
from megalite.model.blockwise import Blocking, attend, attend_backward
from megalite.model.positions import document_starts, local_slopes
from megalite.model.traced_attention import traced_attention
from megalite.parallel.shard import Placement


class _Product(torch.autograd.Function):
    """The attention product with its own backward."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, softmax: CausalSoftmax, blocking: Blocking
    ) -> Tensor:
        out, sums = attend(q, k, v, softmax, blocking)
        ctx.save_for_backward(q, k, v, sums)
        ctx.softmax, ctx.blocking = softmax, blocking
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (q, k, v, sums) = grads, ctx.saved_tensors
        return *attend_backward(grad, q, k, v, sums, ctx.softmax, ctx.blocking), None, None


class UnfusedCore(AttentionCore):
    """The product written out: for every position embedding, head size, dtype and device, with dropout."""

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        super().__init__(config, place)
        slopes = local_slopes(config, place)
        self.slopes = (
            None if slopes is None else torch.tensor(slopes, dtype=torch.float64, device=place.device)
        )
        self.scale = 1.0 / math.sqrt(config.head_dim)
        self.blocking = Blocking.on(place)

    def mask(self, document_ids: Tensor) -> Tensor:
        """The first token of each token's document, ``[b, s]``."""
        return document_starts(document_ids)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, drop: Drop) -> Tensor:
        """As `LayerCore`."""
        softmax = CausalSoftmax(q.shape[2], self.scale, self.slopes, mask, drop)
        if torch.compiler.is_compiling():
            return traced_attention(q, k, v, softmax, self.blocking)
        out: Tensor = _Product.apply(q, k, v, softmax, self.blocking)
        return out
