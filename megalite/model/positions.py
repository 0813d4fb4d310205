"""How a token's place enters attention: rotary angles, ALiBi's bias, or the causal order alone.

Shapes: s sequence, b microbatch, n heads of this rank, d head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megalite.config import ModelConfig
from megalite.parallel.shard import Placement


class Rotary:
    """Rotates queries and keys by their position (Su et al. 2021), halves paired as in Llama and GPT-NeoX.

    Element i of a head is paired with element i + d/2; pair i turns by ``position * base^(-2i/d)``.
    """

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        d = config.head_dim
        self.place = place
        frequencies = config.rotary_base ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)  # [d/2]
        self.frequencies = torch.cat((frequencies, frequencies))  # [d]
        self.tables: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """``[s, b, n, d]`` -> ``[s, b, n, d]``."""
        cosine, sine = self._tables(x.shape[0])
        first, second = x.chunk(2, dim=-1)
        return x * cosine + torch.cat((-second, first), dim=-1) * sine

    def _tables(self, seq_length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each ``[s, 1, 1, d]``; computed in fp64 and rounded once."""
        if seq_length not in self.tables:
            angles = torch.outer(torch.arange(seq_length, dtype=torch.float64), self.frequencies)
            self.tables[seq_length] = (self._place(angles.cos()), self._place(angles.sin()))
        return self.tables[seq_length]

    def _place(self, table: Tensor) -> Tensor:
        return table[:, None, None].to(self.place.device, self.place.dtype)


def no_rotation(x: Tensor) -> Tensor:
    """What stands in the place of `Rotary` where positions enter in another way."""
    return x


def alibi_slopes(num_heads: int) -> list[float]:
    """ALiBi's slope of each head (Press et al. 2022, and their code for other counts).

    A power of two of heads has the slopes 2^(-8/n), 2^(-16/n), …; other counts take those of the power of two
    below, then every second one of the power of two above.
    """
    below = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / below) for i in range(below)]
    return slopes + [2.0 ** (-4.0 * (2 * i + 1) / below) for i in range(num_heads - below)]


def alibi_bias(config: ModelConfig, place: Placement, seq_length: int) -> Tensor:
    """Slope * (key - query position) for this rank's heads, -inf for keys after the query, ``[n/t, s, s]``.

    Distances and not positions: near keys, which weigh most, then keep their precision far into a sample.
    """
    num_heads = config.num_attention_heads // place.tp.size
    first_head = place.tp.rank * num_heads
    slopes = alibi_slopes(config.num_attention_heads)[first_head : first_head + num_heads]
    positions = torch.arange(seq_length, dtype=torch.float64, device=place.device)
    distances = positions - positions[:, None]  # [s, s]
    distances.masked_fill_(distances > 0, -torch.inf)
    return torch.stack([(slope * distances).to(place.dtype) for slope in slopes])


def causal_bias(config: ModelConfig, place: Placement, seq_length: int) -> Tensor:
    """0 for keys up to the query and -inf after it, ``[1, s, s]``."""
    full = torch.full((1, seq_length, seq_length), -torch.inf, dtype=place.dtype, device=place.device)
    return full.triu(1)
