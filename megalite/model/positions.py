"""How a token's place enters attention: rotary angles, ALiBi's bias, or the causal order alone.

Shapes: s sequence, b microbatch, n heads of this rank, d head size.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.config import ModelConfig
from megalite.parallel.shard import Placement


class Angles(NamedTuple):
    """Cosines and sines by which queries and keys turn, each ``[s, b or 1, 1, d]``."""

    cosine: Tensor
    sine: Tensor


class Places(NamedTuple):
    """Where a microbatch's tokens stand for attention, the same in all layers.

    Attributes:
        bias: additive mask ``[b, n/t or 1, s, s]``; None where every sample has the same.
        angles: of rotary positions; None where every sample has the same, or there are none.
    """

    bias: Tensor | None = None
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
        cosine, sine = self._tables(x.shape[0]) if angles is None else angles
        first, second = x.chunk(2, dim=-1)
        return (x * cosine + torch.cat((-second, first), dim=-1) * sine).to(x.dtype)

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


def alibi_bias(config: ModelConfig, place: Placement, seq_length: int, first: int = 0) -> Tensor:
    """Slope * (key - query position) for this rank's heads, -inf for keys after the query, ``[n/t, s, s]``.

    Distances and not positions: near keys, which weigh most, then keep their precision far into a sample.

    Args:
        first: the rows of the queries before this one are left out: ``[n/t, s - first, s]``.
    """
    num_heads = config.num_attention_heads // place.tp.size
    first_head = place.tp.rank * num_heads
    slopes = alibi_slopes(config.num_attention_heads)[first_head : first_head + num_heads]
    positions = torch.arange(seq_length, dtype=torch.float64, device=place.device)
    distances = positions - positions[first:, None]  # [s - first, s]
    distances.masked_fill_(distances > 0, -torch.inf)
    return torch.stack([(slope * distances).to(place.dtype) for slope in slopes])


def causal_bias(config: ModelConfig, place: Placement, seq_length: int, first: int = 0) -> Tensor:
    """0 for keys up to the query and -inf after it, ``[1, s, s]``, from row `first` on."""
    shape = (1, seq_length - first, seq_length)
    return torch.full(shape, -torch.inf, dtype=place.dtype, device=place.device).triu(1 + first)


def within_documents(bias: Tensor, document_ids: Tensor) -> Tensor:
    """Adds to a bias that no token attends beyond its document.

    Args:
        bias: ``[n/t or 1, s, s]``.
        document_ids: ``[b, s]``, a number for each document.

    Returns:
        ``[b, n/t or 1, s, s]``; no row is masked whole, as a token attends to itself.
    """
    foreign = document_ids[:, :, None] != document_ids[:, None]  # [b, s, s]
    return bias.masked_fill(foreign[:, None], -torch.inf)
