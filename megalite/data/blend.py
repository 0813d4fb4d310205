"""Blend several datasets in given proportions."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megalite.data import _index_builder
from megalite.data.gpt_dataset import Dataset, gather, verify_files
from megalite.data.index_cache import (
    Arrays,
    CachedArrays,
    CacheKey,
    IndexCache,
    cached_arrays,
    reported_progress,
)
from megalite.data.storage import FilesInUse
from megalite.utils.errors import UserError

SURPLUS = 0.005
"""Share of extra samples that each dataset of a blend is built for."""

MAX_DATASETS = 2**15 - 1

_FORMAT = 1
"""Part of a cached order's digest: increase it when the same weights give another order."""


def parse_data_path(
    values: Sequence[str], flag: str = "--data-path"
) -> tuple[list[str], tuple[float, ...] | None]:
    """Return the prefixes that a flag names, and their weights if it has any.

    If the number of values is odd, all are prefixes. If it is even, they are WEIGHT PREFIX WEIGHT PREFIX ...,
    or all prefixes if no value at a weight's position is a number.

    Raises:
        UserError: there is no value, weights and prefixes are mixed up, or a weight is not positive.
    """
    values = [value.strip() for value in values]
    if not values:
        raise UserError(f"there is no dataset: pass {flag} PREFIX, or WEIGHT PREFIX WEIGHT PREFIX ...")
    if len(values) % 2:
        for value in values:
            if len(values) > 1 and _number(value) is not None and not os.path.exists(f"{value}.idx"):
                raise UserError(
                    f"{flag} has {len(values)} values, an odd number, so all are read as prefixes, "
                    f"but {value} is a number: pass WEIGHT PREFIX WEIGHT PREFIX ..., or only prefixes"
                )
        return values, None
    weights = [_number(value) for value in values[::2]]
    if all(weight is None for weight in weights):
        return values, None
    for value, weight in zip(values[::2], weights, strict=True):
        if weight is None or not 0 < weight < math.inf:
            raise UserError(f"{flag} has {value} before a prefix: write a positive weight there")
    return values[1::2], tuple(weight for weight in weights if weight is not None)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def normalized(weights: Sequence[float]) -> list[float]:
    """Return the weights divided by their sum."""
    values = np.array(weights, dtype=np.float64)
    result: list[float] = (values / np.sum(values)).tolist()
    return result


def num_samples_to_build(num_samples: int, weight: float) -> int:
    """Return how many samples to build for a dataset with this normalised weight in a blend."""
    return math.ceil(math.ceil(num_samples * weight) * (1 + SURPLUS))


class BlendedDataset:
    """Blend that draws each sample from the dataset furthest behind its share, without randomness.

    Attributes:
        datasets: the datasets to blend.
        dataset_index: int16 [n], dataset of each sample.
        dataset_sample_index: int64 [n], number of each sample in its dataset.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset],
        weights: Sequence[float],
        num_samples: int,
        cache: IndexCache | None = None,
        prefix: str = "",
        split_name: str = "train",
    ) -> None:
        """Order the samples.

        Args:
            datasets: datasets with at least as many samples as the blend draws from each.
            weights: weights of the datasets, in any unit.
            num_samples: number of samples of the blend.
            cache: stores and maps the order; None to build it in memory.
            prefix: prefix of the first corpus; the default cache is beside it.
            split_name: name of the split, used in file names of the cache.
        """

        def build() -> Arrays:
            with reported_progress(
                f"the order of the {split_name} blend", "samples", num_samples
            ) as progress:
                chosen, numbers = _index_builder.build_blend_index(normalized(weights), num_samples, progress)
            drawn = np.bincount(chosen, minlength=len(datasets))
            assert all(n <= len(d) for n, d in zip(drawn, datasets, strict=True)), "a dataset is too small"
            return {"dataset_index": chosen, "dataset_sample_index": numbers}

        values = {"weights": normalized(weights), "num_samples": num_samples, "format": _FORMAT}
        key = CacheKey("BlendedDataset", split_name, values, 2 * num_samples, prefix)
        self._use(datasets, cached_arrays(cache, key, ("dataset_index", "dataset_sample_index"), build))

    def _use(self, datasets: Sequence[Dataset], cached: CachedArrays) -> None:
        self.datasets = tuple(datasets)
        self.dataset_index = cached.arrays["dataset_index"]
        self.dataset_sample_index = cached.arrays["dataset_sample_index"]
        self._files = FilesInUse(cached.files)

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        return self.gather(np.array([index], np.int64))[0]

    def gather(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the samples with these numbers, int64 [b, S + 1]; each dataset is read in one call."""
        for sample in samples.tolist():
            if not 0 <= sample < len(self):
                raise IndexError(f"sample {sample} of a blend of {len(self)}")
        datasets, numbers = self.dataset_index[samples], self.dataset_sample_index[samples]
        self._files.check()
        rows = {d: np.flatnonzero(datasets == d) for d in np.unique(datasets).tolist()}
        try:
            texts = {d: gather(self.datasets[d], numbers[positions]) for d, positions in rows.items()}
        except IndexError:  # the order matched the datasets when it was opened
            self._files.verify()
            raise
        width = next(iter(texts.values())).shape[1]
        result = np.empty((len(samples), width), np.int64)
        for d, positions in rows.items():
            result[positions] = texts[d]
        return result

    def verify_files(self) -> None:
        self._files.verify()
        for dataset in self.datasets:
            verify_files(dataset)
