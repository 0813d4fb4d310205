"""The attention product that a stage's layers share: what they call, and what its backends have in common.

Shapes: s sequence, b microbatch, n query heads of this rank, g' its key/value heads, d head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megalite.config import ModelConfig
from megalite.kernels import Drop
from megalite.model.documents import Documents
from megalite.model.positions import (
    ROTATIONS,
    WHOLE_SAMPLES,
    Angles,
    NoRotation,
    Places,
    attention_bias,
    within_documents,
)
from megalite.parallel.shard import Placement


class LayerCore(Protocol):
    """The attention product as one layer calls it."""

    @property
    def rotate(self) -> Callable[[Tensor, Angles | None], Tensor]: ...

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, drop: Drop) -> Tensor:
        """``[b, n, s, d]`` and twice ``[b, g', s, d]`` -> ``[b, n, s, d]``, by `Places.mask`."""


class Core(Protocol):
    """The attention product of all layers of a stage.

    Attributes:
        choice: which backend this is and why, for the log.
    """

    choice: str

    def places(self, documents: Documents | None) -> Places: ...

    def prepare(self, seq_length: int) -> None: ...

    def of_layer(self, layer: int) -> LayerCore: ...


class AttentionCore(ABC):
    """softmax(q k^T / sqrt(d) + bias) v; one object serves all layers: its tables exist once."""

    choice = ""

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        self.config = config
        self.place = place
        self.rotate = ROTATIONS.get(config.position_embedding_type, NoRotation)(config, place)

    def places(self, documents: Documents | None) -> Places:
        """Where a microbatch's tokens stand: made once for all layers, and only for packed samples."""
        if documents is None:
            return WHOLE_SAMPLES
        ids, positions = documents.document_ids, documents.position_ids
        return Places(
            mask=None if ids is None else self.mask(ids),
            angles=None if positions is None else self.rotate.at(positions),
        )

    def prepare(self, seq_length: int) -> None:
        """Gets ready for compiled layers: what the first sample of this length would make is made now."""
        self.rotate.make_tables(seq_length)

    def of_layer(self, layer: int) -> LayerCore:
        """What a layer calls: itself, which keeps nothing of a layer's own."""
        return self

    @abstractmethod
    def mask(self, document_ids: Tensor) -> Any:
        """What `__call__` needs to keep tokens within their documents, by their numbers ``[b, s]``."""

    @abstractmethod
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, drop: Drop) -> Tensor:
        """``[b, n, s, d]`` and twice ``[b, g', s, d]`` -> ``[b, n, s, d]``, by `Places.mask`."""


class SdpaCore(AttentionCore):
    """PyTorch's scaled_dot_product_attention: no dropout, as its masks would be of the layout's making.

    ALiBi and documents enter as a bias ``[b or 1, n or 1, s, s]``, which stands in memory once.
    """

    def __init__(self, config: ModelConfig, place: Placement, *kernels: SDPBackend) -> None:
        """Takes the kernels that it may run on; by default any."""
        super().__init__(config, place)
        self.has_bias = config.position_embedding_type == "alibi"
        self.biases: dict[int, Tensor] = {}
        self.kernels: Callable[[], AbstractContextManager[Any]] = (
            partial(sdpa_kernel, list(kernels)) if kernels else nullcontext
        )

    def bias(self, seq_length: int) -> Tensor:
        """The additive mask of whole samples, made at its first use."""
        if seq_length not in self.biases:
            self.biases[seq_length] = attention_bias(self.config, self.place, seq_length)
        return self.biases[seq_length]

    def prepare(self, seq_length: int) -> None:
        """As `AttentionCore`."""
        super().prepare(seq_length)
        if self.has_bias:
            self.bias(seq_length)

    def mask(self, document_ids: Tensor) -> Tensor:
        """The bias ``[b, n or 1, s, s]``."""
        return within_documents(self.bias(document_ids.shape[1]), document_ids)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, drop: Drop) -> Tensor:
        """As `LayerCore`."""
        assert drop.p == 0.0, "chosen for a model without dropout of attention weights"
        bias = self.bias(q.shape[-2]) if mask is None and self.has_bias else mask
        with self.kernels():
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=bias, is_causal=bias is None, enable_gqa=q.shape[1] != k.shape[1]
            )
