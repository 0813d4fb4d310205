"""Repeat a dataset for the length of a run, or read it once; log how much of each corpus a run reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from megalite.data.gpt_dataset import Dataset, plan_epochs, verify_files
from megalite.utils.errors import UserError
from megalite.utils.log import log


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
