"""The datasets of a run and the parts of its splits, from a test's few arguments."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megalite.data.build_datasets import BuildOptions, DatasetSplits, build_from_corpora, open_corpora
from megalite.data.corpus_sources import SPLIT_NAMES, Sources, sources_of_one_blend
from megalite.data.samples import GPTSamples


class Numbers:
    """Sample i is [which, i]."""

    def __init__(self, which: int, size: int) -> None:
        self.which, self.size = which, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> np.ndarray:
        assert 0 <= index < self.size
        return np.array([self.which, index])


def build_datasets(
    data_path: Sequence[str],
    split: str,
    seq_length: int,
    num_samples: tuple[int, int, int],
    seed: int,
    vocab_size: int | None = None,
) -> DatasetSplits:
    """One blend that all splits share, as --data-path and --split give it."""
    options = BuildOptions(GPTSamples(seq_length, seed, vocab_size))
    return build_from_sources(sources_of_one_blend(data_path, split), num_samples, options)


def build_from_sources(
    sources: Sources, num_samples: tuple[int, int, int], options: BuildOptions
) -> DatasetSplits:
    return build_from_corpora(sources, open_corpora(sources), num_samples, options)


def split_ranges(split: str, num_sequences: int) -> tuple[range, ...]:
    """The sequences of train, valid and test in a corpus of so many."""
    sources = sources_of_one_blend(["corpus"], split)
    return tuple(sources[name][0].sources[0].sequences(num_sequences) for name in SPLIT_NAMES)
