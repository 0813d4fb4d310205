"""Blend datasets in given proportions, or repeat one for a run; log how much of each corpus a run reads."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from megalite.data import _index_builder
from megalite.data.gpt_dataset import Dataset, gather, plan_epochs, verify_files
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
from megalite.utils.log import log

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


class Epochs:
    """Repeated dataset, in another random order in each epoch.

    The order only depends on the seed and the epoch, so a resumed run continues in it.

    Args:
        num_samples: number of samples in all epochs; the last epoch may be partial.

    Raises:
        UserError: the dataset is empty.
    """

    def __init__(self, dataset: Dataset, num_samples: int, seed: int = 0) -> None:
        if len(dataset) == 0:
            raise UserError("a dataset without samples cannot be trained on")
        self.dataset = dataset
        self._num_samples = num_samples

        @lru_cache(maxsize=2)  # samples are read ahead into the next epoch
        def order(epoch: int) -> npt.NDArray[np.int64]:
            return np.random.default_rng((seed, epoch)).permutation(len(dataset))

        self._order = order

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.number(index)]

    def number(self, index: int) -> int:
        """Return the number of a sample in the dataset that is repeated."""
        epoch, position = divmod(index, len(self.dataset))
        return int(self._order(epoch)[position])

    def verify_files(self) -> None:
        verify_files(self.dataset)


class OnePass:
    """Samples of a dataset, each once; after the last one come zeros, or the first sample if it is no array.

    Args:
        num_samples: number of samples, samples of zeros included.
    """

    def __init__(self, dataset: Dataset, num_samples: int) -> None:
        self._dataset = dataset
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Any:
        is_empty = index >= len(self._dataset)
        row = self._dataset[0 if is_empty else index]
        return np.zeros_like(row) if is_empty and isinstance(row, np.ndarray) else row

    def verify_files(self) -> None:
        verify_files(self._dataset)


_MAX_LINES = 24
"""Number of corpora to log one by one: with more, the most and the least repeated ones."""


@dataclass(frozen=True)
class Coverage:
    """Share of one corpus that a whole run reads.

    Attributes:
        num_tokens: number of tokens in the part that is trained on.
        num_samples: number of samples drawn from it, to within one.
        epochs: average number of times that its tokens are read.
        unseen: share of its tokens that are in no sample; the expected share if it is random.
    """

    prefix: str
    num_tokens: int
    num_samples: float
    epochs: float
    unseen: float

    @classmethod
    def of(
        cls, prefix: str, num_tokens: int, seq_length: int, num_samples: float, num_built: int | None
    ) -> Coverage:
        """Compute the coverage from how the corpus's samples are cut and ordered.

        Args:
            seq_length: S; S tokens of a sample are not in the previous one.
            num_built: number of samples that its order is built for, a few more; None for one epoch.
        """
        if num_tokens <= seq_length:
            return cls(prefix, num_tokens, num_samples, 0.0, 1.0)  # GPTDataset refuses it
        plan = plan_epochs(num_tokens, num_built, seq_length)
        not_drawn = 1 - min(1.0, num_samples / plan.num_samples)
        if plan.num_samples_before_last is not None and num_samples >= plan.num_samples_before_last:
            unseen = 0.0
        elif plan.num_epochs == 1:
            unseen = 1 - min(1.0, num_samples * seq_length / num_tokens)
        else:
            unseen = not_drawn**plan.num_epochs
        return cls(prefix, num_tokens, num_samples, num_samples * seq_length / num_tokens, unseen)

    @property
    def epochs_text(self) -> str:
        """Return the epochs with three digits and without an exponent."""
        return f"{self.epochs:,.0f}" if self.epochs >= 100 else f"{self.epochs:.3g}"

    def line(self) -> str:
        """Return a sentence for the log."""
        text = (
            f"training takes {self.num_samples:,.0f} samples of {self.prefix}: "
            f"{self.epochs_text} epochs of its {self.num_tokens:,} tokens"
        )
        if self.unseen >= 0.0005:
            share = 1 if self.unseen == 1 else min(self.unseen, 0.9999)
            return f"{text}; {100 * share:.4g}% of its tokens are not used"
        return f"{text}, each used about {self.epochs:.1f} times" if self.epochs >= 1.05 else text


def log_coverage(corpora: Sequence[Coverage]) -> None:
    """Log a line for each corpus, the most repeated ones first."""
    ordered = sorted(corpora, key=lambda corpus: -corpus.epochs)
    if len(ordered) > _MAX_LINES:
        half = _MAX_LINES // 2
        between = ordered[half:-half]
        for corpus in ordered[:half]:
            log.info(corpus.line())
        log.info(
            "and of %d more corpora %.3g to %.3g epochs", len(between), between[-1].epochs, between[0].epochs
        )
        ordered = ordered[-half:]
    for corpus in ordered:
        log.info(corpus.line())
