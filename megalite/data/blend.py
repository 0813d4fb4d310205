"""Several datasets as one, in given proportions."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megalite.data import _index_builder
from megalite.data.gpt import Dataset
from megalite.errors import UserError

SURPLUS = 0.005
"""Share of samples that each dataset of a blend is built for beyond its part."""

MAX_DATASETS = 2**15 - 1


def parse_data_path(words: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """The prefixes that --data-path names, and their weights where it gives them.

    An odd number of words are prefixes. An even number are weight prefix weight prefix ..., or all prefixes
    if none of the words in a weight's place is a number.

    Raises:
        UserError: there is no word, weights and prefixes are mixed up, or a weight is not positive.
    """
    words = [word.strip() for word in words]
    if not words:
        raise UserError("no dataset is given: --data-path PREFIX, or WEIGHT PREFIX WEIGHT PREFIX ...")
    if len(words) % 2:
        _refuse_weight_among_prefixes(words)
        return words, None
    weights = [_number(word) for word in words[::2]]
    if all(weight is None for weight in weights):
        return words, None
    for word, weight in zip(words[::2], weights, strict=True):
        if weight is None or not 0 < weight < math.inf:
            raise UserError(f"--data-path has {word} where a positive weight must stand before a prefix")
    return words[1::2], [weight for weight in weights if weight is not None]


def _refuse_weight_among_prefixes(words: Sequence[str]) -> None:
    for word in words:
        if len(words) > 1 and _number(word) is not None and not os.path.exists(f"{word}.idx"):
            raise UserError(
                f"--data-path has {len(words)} words, an odd number, so that all are prefixes, "
                f"but {word} is a number: give WEIGHT PREFIX WEIGHT PREFIX ..., or prefixes only"
            )


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def normalized(weights: Sequence[float]) -> list[float]:
    """The weights divided by their sum."""
    values = np.array(weights, dtype=np.float64)
    result: list[float] = (values / np.sum(values)).tolist()
    return result


def num_samples_to_build(num_samples: int, weight: float) -> int:
    """How many samples a dataset of normalised weight is built for, in a blend of num_samples."""
    return math.ceil(math.ceil(num_samples * weight) * (1 + SURPLUS))


class BlendedDataset:
    """Draws each sample from the dataset that is furthest behind its share; no randomness.

    Attributes:
        dataset_index: int16 [n], the dataset that a sample comes from.
        dataset_sample_index: int64 [n], its number there.
    """

    def __init__(self, datasets: Sequence[Dataset], weights: Sequence[float], num_samples: int) -> None:
        self._datasets = tuple(datasets)
        self.dataset_index, self.dataset_sample_index = _index_builder.build_blend_index(
            normalized(weights), num_samples
        )
        taken = np.bincount(self.dataset_index, minlength=len(datasets))
        assert all(n <= len(d) for n, d in zip(taken, datasets, strict=True)), (
            "a dataset of the blend is too small"
        )

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a blend of {len(self)}")
        dataset = self._datasets[int(self.dataset_index[index])]
        return dataset[int(self.dataset_sample_index[index])]
