"""Change the frequencies of rotary embedding so that a model reads longer samples than it was trained on.

Each function maps the frequencies ``[r/2]`` of the r rotated elements of a head to scaled ones. The second
result multiplies cosines and sines, so that its square multiplies the scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megalite.config import ModelConfig

Scaling = Callable[[Tensor, ModelConfig], tuple[Tensor, float]]


def _none(frequencies: Tensor, config: ModelConfig) -> tuple[Tensor, float]:
    return frequencies, 1.0


def _linear(frequencies: Tensor, config: ModelConfig) -> tuple[Tensor, float]:
    """Interpolate positions (Chen et al. 2023)."""
    return frequencies / config.rope_scaling_factor, 1.0


def _llama3(frequencies: Tensor, config: ModelConfig) -> tuple[Tensor, float]:
    """Interpolate low frequencies only, as Llama 3.1 (Grattafiori et al. 2024)."""
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    turns = config.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # 0 for low frequencies, 1 for high ones
    return frequencies * (kept + (1 - kept) / config.rope_scaling_factor), 1.0


def _yarn(frequencies: Tensor, config: ModelConfig) -> tuple[Tensor, float]:
    """Interpolate by the number of turns within the original length, and sharpen attention.

    YaRN: Peng et al. 2023, sections 3.2 and 3.4.
    """
    factor, size = config.rope_scaling_factor, 2 * len(frequencies)

    def index(turns: float) -> float:
        """Return the index of the frequency with this many turns within the original length."""
        wavelength = config.original_max_position_embeddings / (2 * math.pi * turns)
        return size * math.log(wavelength) / (2 * math.log(config.rotary_base))

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


def _proportional(frequencies: Tensor, config: ModelConfig) -> tuple[Tensor, float]:
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
