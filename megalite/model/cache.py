"""Attention over keys and values that are kept from one call of the model to the next, for generation.

Sequences of unlike length end at the same place: the shorter ones have padding before them, which nothing
attends to. So all go on in step, and what is kept is written and read in slices.

Shapes: s new tokens, l tokens so far with the new ones, b sequences, n query heads, d head size, g' key/value
heads of this rank, t = tp.size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.config import ModelConfig
from megalite.kernels import Drop
from megalite.model.attention_core import SdpaCore
from megalite.model.documents import Documents
from megalite.model.positions import Angles, Places, attention_bias
from megalite.parallel.shard import Placement


class CachedCore(SdpaCore):
    """The attention product of a model that reads a sequence in pieces: a prompt, then token after token.

    `begin` comes before the first piece. A piece's tokens come with the positions that `positions` gives, as
    `Documents.position_ids`; `places`, which the stage calls once for all layers, counts them.

    Attributes:
        length: tokens of a sequence so far, l, padding too.
    """

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        super().__init__(config, place)
        self.layers: dict[int, CachedLayer] = {}
        self.begin(0)

    def of_layer(self, layer: int) -> CachedLayer:
        """What this layer calls, with the keys and values of its own."""
        return self.layers.setdefault(layer, CachedLayer(self))

    def begin(self, capacity: int, padding: Tensor | None = None) -> None:
        """Forgets what was, and begins with sequences of no token.

        Args:
            capacity: tokens that a sequence may come to, padding too.
            padding: int64 ``[b]``, tokens before each sequence that mean nothing; None where there are none.
        """
        self.capacity, self.length = capacity, 0
        self.padding = padding
        for layer in self.layers.values():
            layer.keys = layer.values = None

    def select(self, rows: Tensor) -> None:
        """Goes on with these sequences, int64: left-out ones are forgotten, repeated ones copied."""
        if self.padding is not None:
            self.padding = self.padding[rows]
        for layer in self.layers.values():
            assert layer.keys is not None and layer.values is not None
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]

    def positions(self, num_sequences: int, num_tokens: int) -> Tensor:
        """Positions of the next tokens, ``[b, s]``: they count from 0 after the padding, which has 0 too."""
        places = torch.arange(self.length, self.length + num_tokens, device=self.place.device)
        if self.padding is None:
            return places.expand(num_sequences, -1)
        return (places - self.padding[:, None]).clamp_min_(0)

    def places(self, documents: Documents | None) -> Places:
        """Where the new tokens stand and what they see, ``[b or 1, n/t or 1, s, l]``; None for all before."""
        assert documents is not None and documents.position_ids is not None
        num_tokens = documents.position_ids.shape[1]
        first, self.length = self.length, self.length + num_tokens
        assert self.length <= self.capacity, (self.length, self.capacity)
        is_plain = first == 0 or num_tokens == 1  # the causal order alone, or all that is there
        bias: Tensor | None = None
        if self.has_bias or self.padding is not None or not is_plain:
            bias = attention_bias(self.config, self.place, self.length, first)
        if self.padding is not None and bias is not None:
            bias = bias.masked_fill(self._hidden(first), -torch.inf)
        return Places(bias, self.rotate.beyond(documents.position_ids))

    def _hidden(self, first: int) -> Tensor:
        """Whether a key is padding to a query, ``[b, 1, s, l]``; not to itself: no row is all."""
        assert self.padding is not None
        places = torch.arange(self.length, device=self.place.device)
        is_padding = places < self.padding[:, None]  # [b, l]
        is_other = places != places[first:, None]  # [s, l]
        return (is_padding[:, None] & is_other)[:, None]


class CachedLayer:
    """One layer's keys and values, ``[b, g', capacity, d]``; the first `CachedCore.length` are there."""

    def __init__(self, shared: CachedCore) -> None:
        self.shared = shared
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def rotate(self, x: Tensor, angles: Angles | None) -> Tensor:
        """Queries and keys turn by their own place: what is kept stays as it is."""
        return self.shared.rotate(x, angles)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, drop: Drop) -> Tensor:
        """``[b, n/t, s, d]`` and twice ``[b, g', s, d]``, new alone -> ``[b, n/t, s, d]``, by `Places.mask`.

        Nothing is dropped: this is no training.
        """
        if self.keys is None or self.values is None:
            shape = (*k.shape[:2], self.shared.capacity, k.shape[3])
            self.keys, self.values = k.new_empty(shape), v.new_empty(shape)
        length, num_tokens = self.shared.length, k.shape[2]
        self.keys[:, :, length - num_tokens : length] = k
        self.values[:, :, length - num_tokens : length] = v
        return F.scaled_dot_product_attention(
            q,
            self.keys[:, :, :length],
            self.values[:, :, :length],
            attn_mask=mask,
            is_causal=mask is None and num_tokens > 1,
            enable_gqa=q.shape[1] != k.shape[1],
        )
