"""Token positions in attention: rotary angles, ALiBi slopes, boundaries of packed documents.

Shapes: s sequence, b microbatch, n query heads, d head size, tp = tp.size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.config import ModelConfig
from megalite.kernels import rotate
from megalite.tensor_parallel.parameter_spec import LayerContext


class Angles(NamedTuple):
    """Holds the cosines and sines that rotate queries and keys, each ``[s, b or 1, 1, d]``."""

    cosine: Tensor
    sine: Tensor


class PositionInfo(NamedTuple):
    """Describes the positions of a microbatch's tokens for attention; all layers share it.

    Attributes:
        mask: documents in the attention core's own representation; None without packed documents.
        angles: angles of rotary embedding; None for positions within the sample, and in models without it.
    """

    mask: Any = None
    angles: Angles | None = None


class Rotary:
    """Rotates queries and keys by their position (Su et al. 2021), halves paired as in Llama and GPT-NeoX.

    Element i of a head is paired with element i + d/2. Pair i is rotated by ``position * base^(-2i/d)``.
    """

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        d = config.head_dim
        self.device = context.device
        # At least fp32: 8 bits of a cosine are too few to distinguish positions.
        self.dtype = torch.promote_types(context.dtype, torch.float32)
        frequencies = config.rotary_base ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)  # [d/2]
        self.frequencies = torch.cat((frequencies, frequencies))  # [d]
        self.tables: dict[int, Angles] = {}

    def __call__(self, x: Tensor, angles: Angles | None) -> Tensor:
        """Rotate ``[s, b, n, d]`` by these angles, or by default by the angles of positions in the sample."""
        return rotate(x, *(self.table(x.shape[0]) if angles is None else angles))

    def look_up(self, position_ids: Tensor) -> Angles:
        """Look up the angles of tokens at positions ``[b, s]``, all below s."""
        cosine, sine = self.table(position_ids.shape[1])
        rows = position_ids.t()
        return Angles(cosine[rows, 0], sine[rows, 0])

    def compute(self, position_ids: Tensor) -> Angles:
        """Compute the angles of tokens at any positions ``[b, s]``."""
        frequencies = self.frequencies.to(position_ids.device)
        angles = position_ids.t()[:, :, None].double() * frequencies  # [s, b, d]
        return Angles(angles.cos().to(self.dtype)[:, :, None], angles.sin().to(self.dtype)[:, :, None])

    def table(self, seq_length: int) -> Angles:
        """Return the angles of the positions in a sample, ``[s, 1, 1, d]``, computed at the first call."""
        if seq_length not in self.tables:
            positions = torch.arange(seq_length, dtype=torch.float64)
            angles = torch.outer(positions, self.frequencies)[:, None, None]  # rounded once, from fp64
            self.tables[seq_length] = Angles(
                angles.cos().to(self.device, self.dtype), angles.sin().to(self.device, self.dtype)
            )
        return self.tables[seq_length]


class NoRotation:
    """Replaces `Rotary` in models with another position embedding."""

    def __init__(self, config: ModelConfig, context: LayerContext) -> None:
        self.tables: dict[int, Angles] = {}

    def __call__(self, x: Tensor, angles: Angles | None) -> Tensor:
        return x

    def look_up(self, position_ids: Tensor) -> None:
        return None

    def compute(self, position_ids: Tensor) -> None:
        return None

    def table(self, seq_length: int) -> None:
        return None


ROTATIONS: dict[str, Callable[[ModelConfig, LayerContext], Rotary | NoRotation]] = {"rope": Rotary}
"""Rotary embeddings by the config's position embedding."""


def alibi_slopes(num_heads: int) -> list[float]:
    """Return ALiBi's slope for each head (Press et al. 2022, and their code for other counts).

    If n is a power of two, the slopes are 2^(-8/n), 2^(-16/n), …. Otherwise they are the slopes of the power
    of two below n, followed by every second slope of the power of two above.
    """
    below = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / below) for i in range(below)]
    return slopes + [2.0 ** (-4.0 * (2 * i + 1) / below) for i in range(num_heads - below)]


def local_slopes(config: ModelConfig, context: LayerContext) -> list[float] | None:
    """Return ALiBi's slopes for this rank's heads, or None for models with another position embedding."""
    if config.position_embedding_type != "alibi":
        return None
    num_heads = config.num_attention_heads // context.tp.size
    return alibi_slopes(config.num_attention_heads)[context.tp.rank * num_heads :][:num_heads]


def attention_bias(config: ModelConfig, context: LayerContext, seq_length: int, first: int = 0) -> Tensor:
    """Return the bias of the scaled scores, ``[1, n/tp or 1, s, s]``: -inf for later keys if causal.

    For keys up to the query it is ALiBi's slope * (key - query position), or 0 without ALiBi. It uses
    distances instead of positions, so that near keys, which weigh most, keep their precision in long samples.

    Args:
        first: omit the rows of the queries before this one: ``[1, n/tp or 1, s - first, s]``.
    """
    positions = torch.arange(seq_length, dtype=torch.float64, device=context.device)
    distances = positions - positions[first:, None]  # [s - first, s]
    after = distances > 0 if config.is_causal else torch.zeros_like(distances, dtype=torch.bool)
    slopes = local_slopes(config, context) or [0.0]
    heads = [(slope * distances).masked_fill_(after, -torch.inf).to(context.dtype) for slope in slopes]
    return torch.stack(heads)[None]


def within_documents(bias: Tensor, document_ids: Tensor) -> Tensor:
    """Mask the keys of other documents in a bias.

    Args:
        bias: ``[1, n/tp or 1, s, s]``.
        document_ids: ``[b, s]``, a number for each document.

    Returns:
        ``[b, n/tp or 1, s, s]``; no row is masked entirely, because a token attends to itself.
    """
    is_other = document_ids[:, :, None] != document_ids[:, None]  # [b, s, s]
    return bias.masked_fill(is_other[:, None], -torch.inf)


class SeenKeys(NamedTuple):
    """Holds the range of keys that each query sees: the keys of its document, up to itself if causal.

    Attributes:
        starts: int64 ``[b, s]``, position of the first key.
        ends: int64 ``[b, s]``, position after the last key; None if the last key is the query's own.
    """

    starts: Tensor
    ends: Tensor | None = None


def seen_keys(document_ids: Tensor, config: ModelConfig) -> SeenKeys:
    """Return the keys that each query sees in packed documents ``[b, s]``."""
    starts = document_starts(document_ids)
    if config.is_causal:
        return SeenKeys(starts)
    from_the_end = document_starts(document_ids.flip(1)).flip(1)
    return SeenKeys(starts, document_ids.shape[1] - from_the_end)


def document_starts(document_ids: Tensor) -> Tensor:
    """Return the sample position of the first token of each token's document, int64 ``[b, s]``.

    A document is a run of equal numbers: the same number after another one is a different document.
    """
    positions = torch.arange(document_ids.shape[1], device=document_ids.device)
    is_first = document_ids.diff(dim=1, prepend=document_ids[:, :1] - 1) != 0
    return positions.where(is_first, 0).cummax(dim=1).values
