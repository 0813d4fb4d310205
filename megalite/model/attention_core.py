"""The attention core, softmax(q k^T / sqrt(d) + bias) v, that the layers of a stage share.

Shapes: s sequence, b microbatch, n query heads of this rank, g' its key/value heads, d head size.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megalite.config import ModelConfig
from megalite.kernels import CausalSoftmax, Drop, flash_attention
from megalite.microbatch import Microbatch
from megalite.model.blockwise_attention import Blocking, attend, attend_backward
from megalite.model.positions import (
    ROTATIONS,
    Angles,
    NoRotation,
    PositionInfo,
    SeenKeys,
    attention_bias,
    local_slopes,
    seen_keys,
    within_documents,
)
from megalite.model.traced_attention import traced_attention
from megalite.tensor_parallel.parameter_spec import LayerContext


class LayerCore(Protocol):
    """Interface of the attention core that one layer calls."""

    @property
    def rotate(self) -> Callable[[Tensor, Angles | None], Tensor]: ...

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, drop: Drop) -> Tensor:
        """Map ``[b, n, s, d]`` and twice ``[b, g', s, d]`` to ``[b, n, s, d]``.

        Args:
            mask: the mask of `PositionInfo`.
            drop: dropout settings of the attention weights.
        """


class Core(Protocol):
    """Base class of the attention core of all layers of a stage.

    Attributes:
        choice: the backend and the reason for its choice, for the log.
    """

    choice: str

    def position_info(self, microbatch: Microbatch) -> PositionInfo: ...

    def prepare(self, seq_length: int) -> None: ...

    def tables(self) -> Iterable[Tensor]: ...

    def for_layer(self, layer: int) -> LayerCore: ...


class AttentionCore(ABC):
    """Base class of the backends for training: all layers share one set of tables."""

    choice = ""

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        self.config = config
        self.context = context
        self.rotate = ROTATIONS.get(config.position_embedding_type, NoRotation)(config, context)

    def position_info(self, microbatch: Microbatch) -> PositionInfo:
        """Return the positions of a microbatch's tokens, computed once for all layers."""
        ids, positions = microbatch.document_ids, microbatch.position_ids
        assert ids is not None or self.config.is_causal, "bidirectional attention must know the padding"
        return PositionInfo(
            mask=None if ids is None else self.mask(ids),
            angles=None if positions is None else self.rotate.look_up(positions),
        )

    def prepare(self, seq_length: int) -> None:
        """Build the tables for samples of this length, for layers that are then compiled."""
        self.rotate.table(seq_length)

    def tables(self) -> Iterable[Tensor]:
        """Yield the tables that all layers share and that autograd may save."""
        for angles in self.rotate.tables.values():
            yield from angles

    def for_layer(self, layer: int) -> LayerCore:
        """Return the core of one layer: this object, because it has no state per layer."""
        return self

    @abstractmethod
    def mask(self, document_ids: Tensor) -> Any:
        """Return the mask that keeps attention within documents ``[b, s]``, in the core's representation."""

    @abstractmethod
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, drop: Drop) -> Tensor:
        """Compute attention; see `LayerCore`."""


class SdpaCore(AttentionCore):
    """Calls PyTorch's scaled_dot_product_attention, without dropout: its masks would depend on the layout.

    ALiBi and documents are passed as a bias ``[b or 1, n or 1, s, s]``, which all layers share.

    Args:
        kernels: kernels that it may use, the preferred one first; by default any kernel.
    """

    def __init__(self, config: ModelConfig, context: LayerContext, *kernels: SDPBackend) -> None:
        super().__init__(config, context)
        self.has_bias = config.position_embedding_type == "alibi"
        self.biases: dict[int, Tensor] = {}
        self.kernels: Callable[[], AbstractContextManager[Any]] = (
            partial(sdpa_kernel, list(kernels), set_priority=True) if kernels else nullcontext
        )

    def bias(self, seq_length: int) -> Tensor:
        """Return the bias of samples without packed documents, computed at the first call."""
        if seq_length not in self.biases:
            self.biases[seq_length] = attention_bias(self.config, self.context, seq_length)
        return self.biases[seq_length]

    def prepare(self, seq_length: int) -> None:
        """Build the tables; see `AttentionCore`."""
        super().prepare(seq_length)
        if self.has_bias:
            self.bias(seq_length)

    def tables(self) -> Iterable[Tensor]:
        """Yield the angles, and the biases."""
        yield from super().tables()
        yield from self.biases.values()

    def mask(self, document_ids: Tensor) -> Tensor:
        """Return the bias ``[b, n or 1, s, s]``."""
        return within_documents(self.bias(document_ids.shape[1]), document_ids)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, drop: Drop) -> Tensor:
        """Compute attention; see `LayerCore`."""
        assert drop.p == 0.0, "this backend does not support dropout of attention weights"
        bias = self.bias(q.shape[-2]) if mask is None and self.has_bias else mask
        with self.kernels():
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=bias, is_causal=bias is None, enable_gqa=q.shape[1] != k.shape[1]
            )


class _BlockwiseAttention(torch.autograd.Function):
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


class SoftmaxCore(AttentionCore):
    """Base class of our kernels, with slopes and documents instead of a bias, and counter-based dropout."""

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        slopes = local_slopes(config, context)
        self.slopes = (
            None if slopes is None else torch.tensor(slopes, dtype=torch.float64, device=context.device)
        )
        self.scale = 1.0 / math.sqrt(config.head_dim)

    def mask(self, document_ids: Tensor) -> SeenKeys:
        """Return the range of keys that each query sees."""
        return seen_keys(document_ids, self.config)

    def softmax(self, q: Tensor, mask: SeenKeys | None, drop: Drop) -> CausalSoftmax:
        """Return the softmax of the scores of queries ``[b, n, s, d]``."""
        starts, ends = (None, None) if mask is None else mask
        return CausalSoftmax(q.shape[2], self.scale, self.slopes, starts, ends, drop)


class UnfusedCore(SoftmaxCore):
    """Computes attention block by block; supports all positions, head sizes, dtypes, devices and dropout."""

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        self.blocking = Blocking.for_device(context.device, context.dtype)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: SeenKeys | None, drop: Drop) -> Tensor:
        """Compute attention; see `LayerCore`."""
        softmax = self.softmax(q, mask, drop)
        if torch.compiler.is_compiling():
            return traced_attention(q, k, v, softmax, self.blocking)
        out: Tensor = _BlockwiseAttention.apply(q, k, v, softmax, self.blocking)
        return out


class TritonCore(SoftmaxCore):
    """Computes attention in our Triton kernels, with the dropout masks of `UnfusedCore`."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: SeenKeys | None, drop: Drop) -> Tensor:
        """Compute attention; see `LayerCore`."""
        return flash_attention(q, k, v, self.softmax(q, mask, drop))
