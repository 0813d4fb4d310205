"""How a token's place enters attention: rotary angles, ALiBi's slopes, or the causal order alone.

Shapes: s sequence, b microbatch, n heads of this rank, d head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.config import ModelConfig
from megalite.kernels import rotate
from megalite.parallel.shard import Placement


class Angles(NamedTuple):
    """Cosines and sines by which queries and keys turn, each ``[s, b or 1, 1, d]``."""

    cosine: Tensor
    sine: Tensor


class Places(NamedTuple):
    """Where a microbatch's tokens stand for attention, the same in all layers.

    Attributes:
        mask: what the attention core made of the documents, for itself; None where every sample is whole.
        angles: of rotary positions; None where every sample has the same, or there are none.
    """

    mask: Any = None
    angles: Angles | None = None


WHOLE_SAMPLES = Places()
"""Positions from a sample's first token to its last, and attention over all of it."""


class Rotary:
    """Rotates queries and keys by their position (Su et al. 2021), halves paired as in Llama and GPT-NeoX.

    Element i of a head is paired with element i + d/2; pair i turns by ``position * base^(-2i/d)``.
    """

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        d = config.head_dim
        self.place = place
        frequencies = config.rotary_base ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)  # [d/2]
        self.frequencies = torch.cat((frequencies, frequencies))  # [d]
        self.tables: dict[int, Angles] = {}

    def __call__(self, x: Tensor, angles: Angles | None) -> Tensor:
        """``[s, b, n, d]`` -> ``[s, b, n, d]``, by these angles or those of the places in the sample."""
        return rotate(x, *(self._tables(x.shape[0]) if angles is None else angles))

    def at(self, position_ids: Tensor) -> Angles:
        """The angles of tokens at positions ``[b, s]``."""
        cosine, sine = self._tables(position_ids.shape[1])
        rows = position_ids.t()
        return Angles(cosine[rows, 0], sine[rows, 0])

    def beyond(self, position_ids: Tensor) -> Angles:
        """As `at`, of positions that may lie beyond the tokens that are given: computed, not looked up."""
        frequencies = self.frequencies.to(position_ids.device)
        angles = position_ids.t()[:, :, None].double() * frequencies  # [s, b, d]
        dtype = torch.promote_types(self.place.dtype, torch.float32)
        return Angles(angles.cos().to(dtype)[:, :, None], angles.sin().to(dtype)[:, :, None])

    def make_tables(self, seq_length: int) -> None:
        """Makes now what would be made at the first sample of this length."""
        self._tables(seq_length)

    def _tables(self, seq_length: int) -> Angles:
        """The angles of the places in a sample, ``[s, 1, 1, d]``; computed in fp64 and rounded once."""
        if seq_length not in self.tables:
            angles = torch.outer(torch.arange(seq_length, dtype=torch.float64), self.frequencies)
            self.tables[seq_length] = Angles(self._place(angles.cos()), self._place(angles.sin()))
        return self.tables[seq_length]

    def _place(self, table: Tensor) -> Tensor:
        """In fp32 at the least: 8 bits of a cosine would be the position's, at best, to 1 in 256."""
        dtype = torch.promote_types(self.place.dtype, torch.float32)
        return table[:, None, None].to(self.place.device, dtype)


class NoRotation:
    """What stands in the place of `Rotary` where positions enter in another way."""

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        pass

    def __call__(self, x: Tensor, angles: Angles | None) -> Tensor:
        return x

    def make_tables(self, seq_length: int) -> None:
        return None

    def at(self, position_ids: Tensor) -> None:
        return None

    def beyond(self, position_ids: Tensor) -> None:
        return None


def alibi_slopes(num_heads: int) -> list[float]:
    """ALiBi's slope of each head (Press et al. 2022, and their code for other counts).

    A power of two of heads has the slopes 2^(-8/n), 2^(-16/n), …; other counts take those of the power of two
    below, then every second one of the power of two above.
    """
    below = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / below) for i in range(below)]
    return slopes + [2.0 ** (-4.0 * (2 * i + 1) / below) for i in range(num_heads - below)]


def local_slopes(config: ModelConfig, place: Placement) -> list[float] | None:
    """ALiBi's slopes of this rank's heads; None where positions enter in another way."""
    if config.position_embedding_type != "alibi":
        return None
    num_heads = config.num_attention_heads // place.tp.size
    return alibi_slopes(config.num_attention_heads)[place.tp.rank * num_heads :][:num_heads]


def attention_bias(config: ModelConfig, place: Placement, seq_length: int, first: int = 0) -> Tensor:
    """What is added to scaled scores, -inf for keys after the query, ``[1, n/t or 1, s, s]``.

    With ALiBi slope * (key - query position) for keys up to the query, else 0. Distances and not positions:
    near keys, which weigh most, then keep their precision far into a sample.

    Args:
        first: the rows of the queries before this one are left out: ``[1, n/t or 1, s - first, s]``.
    """
    positions = torch.arange(seq_length, dtype=torch.float64, device=place.device)
    distances = positions - positions[first:, None]  # [s - first, s]
    after = distances > 0
    slopes = local_slopes(config, place) or [0.0]
    heads = [(slope * distances).masked_fill_(after, -torch.inf).to(place.dtype) for slope in slopes]
    return torch.stack(heads)[None]


def within_documents(bias: Tensor, document_ids: Tensor) -> Tensor:
    """Adds to a bias that no token attends beyond its document.

    Args:
        bias: ``[1, n/t or 1, s, s]``.
        document_ids: ``[b, s]``, a number for each document.

    Returns:
        ``[b, n/t or 1, s, s]``; no row is masked whole, as a token attends to itself.
    """
    foreign = document_ids[:, :, None] != document_ids[:, None]  # [b, s, s]
    return bias.masked_fill(foreign[:, None], -torch.inf)


def document_starts(document_ids: Tensor) -> Tensor:
    """The place in its sample of the first token of each token's document, int64 ``[b, s]``.

    Documents stand one after the other: where two have one number they are two all the same.
    """
    places = torch.arange(document_ids.shape[1], device=document_ids.device)
    begins = document_ids.diff(dim=1, prepend=document_ids[:, :1] - 1) != 0
    return places.where(begins, 0).cummax(dim=1).values


ROTATIONS: dict[str, Callable[[ModelConfig, Placement], Rotary | NoRotation]] = {"rope": Rotary}
"""Position embeddings that turn queries and keys."""
