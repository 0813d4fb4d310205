"""Token positions in attention: rotary angles, their scaling for long samples, and ALiBi's bias.

Shapes: s sequence, b microbatch, n query heads, d head size, r its rotated elements, tp = tp.size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.config import ModelConfig
from megalite.config.model.attention import RotarySpec
from megalite.distributed.axis import HeldPositions
from megalite.kernels import VisibleKeys, rotate
from megalite.tensor_parallel.parameter_spec import LayerContext


class Angles(NamedTuple):
    """Cosines and sines that rotate queries and keys, each ``[s, b or 1, 1, r]``."""

    cosine: Tensor
    sine: Tensor


class PositionInfo(NamedTuple):
    """Positions of a microbatch's tokens for attention; all layers share it.

    Attributes:
        visible: keys that each query sees, by the window of a layer.
        angles: angles of each of `StageCore.rotations`; None for positions within the sample.
        query_factors: ``[s, b or 1, 1, 1]``, factors of the queries; None without them.
        document_starts: int64 ``[b, s]``, for recurrent layers: position of the first token of each token's
            document, counted from the first of the s tokens. It is negative if the document began in an
            earlier piece of the sequence. None if all tokens are of one document, which may have begun
            earlier.
        rank_order: int64 ``[s, b]``, for recurrent layers: positions of the tokens of all context-parallel
            ranks, those of one rank after those of another; None if they are the same in all samples.
        is_replicated: whether each context-parallel rank has all of the tokens, instead of its slices, as all
            have in generation after the prompt.
        is_real: bool ``[s, b]``, for routers of experts: False for padding. None without padding.
    """

    visible: dict[int | None, VisibleKeys]
    angles: tuple[Angles, ...] | None = None
    query_factors: Tensor | None = None
    document_starts: Tensor | None = None
    rank_order: Tensor | None = None
    is_replicated: bool = False
    is_real: Tensor | None = None


Scaling = Callable[[Tensor, float, ModelConfig], tuple[Tensor, float]]
"""Functions that scale the frequencies ``[r/2]`` so that a model reads longer samples than it was trained on.

The second argument is the base of the frequencies.
The second result multiplies cosines and sines, so that its square multiplies the scores.
"""


def _none(frequencies: Tensor, base: float, config: ModelConfig) -> tuple[Tensor, float]:
    return frequencies, 1.0


def _linear(frequencies: Tensor, base: float, config: ModelConfig) -> tuple[Tensor, float]:
    """Interpolate positions (Chen et al. 2023)."""
    return frequencies / config.rope_scaling_factor, 1.0


def _llama3(frequencies: Tensor, base: float, config: ModelConfig) -> tuple[Tensor, float]:
    """Interpolate low frequencies only, as Llama 3.1 (Grattafiori et al. 2024)."""
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    turns = config.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # 0 for low frequencies, 1 for high ones
    return frequencies * (kept + (1 - kept) / config.rope_scaling_factor), 1.0


def _yarn(frequencies: Tensor, base: float, config: ModelConfig) -> tuple[Tensor, float]:
    """Interpolate by the number of turns within the original length, and sharpen attention.

    YaRN: Peng et al. 2023, sections 3.2 and 3.4.
    """
    factor, size = config.rope_scaling_factor, 2 * len(frequencies)

    def index(turns: float) -> float:
        """Return the index of the frequency with this many turns within the original length."""
        wavelength = config.original_max_position_embeddings / (2 * math.pi * turns)
        return size * math.log(wavelength) / (2 * math.log(base))

    first, last = index(config.yarn_beta_fast), index(config.yarn_beta_slow)
    if config.yarn_truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    if first == last:
        last += 0.001
    indices = torch.arange(len(frequencies), dtype=frequencies.dtype)
    interpolated = ((indices - first) / (last - first)).clamp(0.0, 1.0)
    scaled = frequencies * (1 - interpolated) + frequencies / factor * interpolated
    return scaled, config.yarn_attention_factor or _attention_factor(config)


def _attention_factor(config: ModelConfig) -> float:
    def scale(multiplier: float) -> float:
        return 0.1 * multiplier * math.log(max(config.rope_scaling_factor, 1.0)) + 1.0

    if config.yarn_mscale and config.yarn_mscale_all_dim:
        return scale(config.yarn_mscale) / scale(config.yarn_mscale_all_dim)
    return scale(1.0)


def _proportional(frequencies: Tensor, base: float, config: ModelConfig) -> tuple[Tensor, float]:
    """Keep the highest frequencies, and do not rotate the pairs of the others (Gemma 4)."""
    num_kept = int(config.proportional_rotary_share * 2 * len(frequencies) // 2)
    kept = torch.arange(len(frequencies)) < num_kept
    return frequencies * kept, 1.0


SCALINGS: Mapping[str, Scaling] = {
    "none": _none,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "proportional": _proportional,
}
"""Functions by the config's `rope_scaling`."""


class Rotary:
    """Rotates the first r elements of queries and keys by their position (Su et al. 2021).

    Element i of a head is paired with element i + r/2, as in Llama and GPT-NeoX. Pair i is rotated by
    ``position * base^(-2i/r)``, or by a scaled frequency. Interleaved pairs are elements 2i and 2i + 1: they
    come out in the order of the other pairs, in queries and keys alike, which does not change the scores.
    """

    def __init__(self, spec: RotarySpec, config: ModelConfig, context: LayerContext) -> None:
        self.size, self.is_interleaved = spec.size, config.rotary_interleaved
        self.device = context.device
        # At least fp32: 8 bits of a cosine are too few to distinguish positions.
        self.dtype = torch.promote_types(context.dtype, torch.float32)
        exponents = torch.arange(0, self.size, 2, dtype=torch.float64) / self.size  # [r/2]
        frequencies, self.factor = SCALINGS[spec.scaling](spec.base**-exponents, spec.base, config)
        self.frequencies = torch.cat((frequencies, frequencies))  # [r]
        self.tables: dict[int, Angles] = {}

    def __call__(self, x: Tensor, angles: Angles | None) -> Tensor:
        """Rotate ``[s, b, n, d]`` by these angles, or by default by the angles of positions in the sample."""
        angles = self.table(x.shape[0]) if angles is None else angles
        if self.size == x.shape[-1] and not self.is_interleaved:
            return rotate(x, *angles)
        rotated, rest = x[..., : self.size], x[..., self.size :]
        if self.is_interleaved:
            rotated = rotated.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return torch.cat((rotate(rotated, *angles), rest), dim=-1)

    def look_up(self, position_ids: Tensor, seq_length: int) -> Angles:
        """Look up the angles of tokens at positions ``[b, s]`` in samples of this length."""
        cosine, sine = self.table(seq_length)
        rows = position_ids.t()
        return Angles(cosine[rows, 0], sine[rows, 0])

    def held_by(self, own: HeldPositions, seq_length: int) -> Angles:
        """Return the angles of a rank's positions in a sample, ``[s/count, 1, 1, r]``."""
        cosine, sine = (own.take(x, dim=0) for x in self.table(seq_length))
        return Angles(cosine, sine)

    def compute(self, position_ids: Tensor) -> Angles:
        """Compute the angles of tokens at any positions ``[b, s]``."""
        frequencies = self.frequencies.to(position_ids.device)
        angles = position_ids.t()[:, :, None, None].double() * frequencies  # [s, b, 1, r], rounded once below
        cosine, sine = angles.cos() * self.factor, angles.sin() * self.factor
        return Angles(cosine.to(self.dtype), sine.to(self.dtype))

    def table(self, seq_length: int) -> Angles:
        """Return the angles of the positions in a sample, ``[s, 1, 1, r]``, computed at the first call."""
        if seq_length not in self.tables:
            self.tables[seq_length] = self.compute(torch.arange(seq_length, device=self.device)[None])
        return self.tables[seq_length]


class QueryScale:
    """Computes the factor of a query by its position, 1 + beta log(1 + floor(position / original length)).

    With more keys, the softmax is flatter; the factor sharpens it again (Llama 4, Ministral 3).
    """

    def __init__(self, beta: float, original_length: int, context: LayerContext) -> None:
        self.beta, self.original_length = beta, original_length
        self.context = context
        self.tables: dict[int, Tensor] = {}

    def compute(self, position_ids: Tensor) -> Tensor:
        """Return the factors of tokens at any positions ``[b, s]``, ``[s, b, 1, 1]``."""
        lengths = position_ids.t()[:, :, None, None] // self.original_length
        return (1.0 + self.beta * lengths.double().log1p()).to(self.context.dtype)

    def table(self, seq_length: int) -> Tensor:
        """Return the factors of the positions in a sample, ``[s, 1, 1, 1]``, computed at the first call."""
        if seq_length not in self.tables:
            positions = torch.arange(seq_length, device=self.context.device)
            self.tables[seq_length] = self.compute(positions[None])
        return self.tables[seq_length]


def build_query_scale(config: ModelConfig, context: LayerContext) -> QueryScale | None:
    """Return the factors of queries by position, or None for a model without them."""
    beta = config.llama_4_scaling_beta
    if beta is None or config.rope_scaling not in ("llama3", "yarn"):
        return None
    return QueryScale(beta, config.original_max_position_embeddings, context)


def alibi_slopes(num_heads: int) -> list[float]:
    """Return ALiBi's slope for each head (Press et al. 2022, and their code for other counts).

    If n is a power of two, the slopes are 2^(-8/n), 2^(-16/n), …. Otherwise they are the slopes of the power
    of two below n, followed by every second slope of the power of two above.
    """
    below = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / below) for i in range(below)]
    return slopes + [2.0 ** (-4.0 * (2 * i + 1) / below) for i in range(num_heads - below)]


def local_slopes(config: ModelConfig, context: LayerContext) -> Tensor | None:
    """Return ALiBi's slopes for this rank's heads, fp64 ``[n/tp]``, or None for models without ALiBi."""
    slopes = _local_slopes(config, context)
    return None if slopes is None else torch.tensor(slopes, dtype=torch.float64, device=context.device)


def _local_slopes(config: ModelConfig, context: LayerContext) -> list[float] | None:
    if config.position_embedding_type != "alibi":
        return None
    own = context.attention_heads
    num_heads = config.num_attention_heads // own.count
    return alibi_slopes(config.num_attention_heads)[own.index * num_heads :][:num_heads]


def distance_bias(config: ModelConfig, context: LayerContext, seq_length: int, queries: range) -> Tensor:
    """Return ALiBi's bias of the scaled scores, ``[n/tp, m, s]``, or zeros ``[1, m, s]`` without ALiBi.

    ALiBi's bias is slope * (key - query position). It uses distances instead of positions, so that near keys,
    which weigh most, keep their precision in long samples.

    Args:
        queries: positions of the m queries.
    """
    positions = torch.arange(seq_length, dtype=torch.float64, device=context.device)
    distances = positions - positions[queries.start : queries.stop, None]  # [m, s]
    slopes = _local_slopes(config, context) or [0.0]
    return torch.stack([(slope * distances).to(context.dtype) for slope in slopes])
