"""Generate random tokens, to try a config without a corpus."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

NUM_ENDS = 4
"""Average number of document ends in a sample."""


class MockDataset:
    """Samples of uniformly random tokens; a sample depends on the seed, the split and its number.

    Args:
        split: number of the split, so that splits differ.
        eod: if set, the token that ends documents of random length: on average NUM_ENDS per sample.
    """

    def __init__(
        self,
        num_samples: int,
        seq_length: int,
        vocab_size: int,
        seed: int,
        split: int,
        eod: int | None = None,
    ) -> None:
        self._num_samples = num_samples
        self._seq_length = seq_length
        self._vocab_size = vocab_size
        self._key = (seed, split)
        self._eod = eod

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        generator = np.random.default_rng((*self._key, index))
        tokens = generator.integers(0, self._vocab_size, self._seq_length + 1, dtype=np.int64)
        if self._eod is not None:
            tokens[generator.random(len(tokens)) < NUM_ENDS / len(tokens)] = self._eod
        return tokens
