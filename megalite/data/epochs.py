"""Repeat a dataset for the length of a run, or read it once."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from megalite.data.gpt_dataset import Dataset, verify_files
from megalite.utils.errors import UserError


class Epochs:
    """Repeated dataset, in another random order in each epoch.

    The order only depends on the seed and the epoch, so a resumed run continues in it.

    Args:
        num_samples: number of samples in all epochs; the last epoch may be partial.

    Attributes:
        dataset: the dataset that is repeated.

    Raises:
        UserError: the dataset is empty.
    """

    def __init__(self, dataset: Dataset, num_samples: int, seed: int = 0) -> None:
        if len(dataset) == 0:
            raise UserError("a dataset without samples cannot be trained on")
        self.dataset = dataset
        self._num_samples = num_samples
        self._seed = seed
        self._order = lru_cache(maxsize=2)(self._permutation)  # samples are read ahead into the next epoch

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

    def _permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the order of one epoch, int64 ``[n]``."""
        return np.random.default_rng((self._seed, epoch)).permutation(len(self.dataset))


class OnePass:
    """Samples of a dataset of arrays, each once; samples after the last one are zeros.

    Args:
        num_samples: number of samples, samples of zeros included.
    """

    def __init__(self, dataset: Dataset, num_samples: int) -> None:
        self._dataset = dataset
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        is_empty = index >= len(self._dataset)
        row: npt.NDArray[np.int64] = self._dataset[0 if is_empty else index]
        return np.zeros_like(row) if is_empty else row

    def verify_files(self) -> None:
        verify_files(self._dataset)
