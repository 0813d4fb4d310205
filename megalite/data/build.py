"""The datasets of a run: prefixes, split and numbers of samples in; train, valid and test out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megalite.data.blend import (
    MAX_DATASETS,
    BlendedDataset,
    normalized,
    num_samples_to_build,
    parse_data_path,
)
from megalite.data.gpt import Dataset, GPTDataset
from megalite.data.indexed import IndexedDataset
from megalite.data.mock import MockDataset
from megalite.data.splits import SPLIT_NAMES, split_ranges
from megalite.errors import UserError
from megalite.log import log


@dataclass(frozen=True)
class DatasetSplits:
    """One dataset a split; None where nothing is asked of it, or its share of the corpus is empty."""

    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None


def num_samples_per_split(
    train_samples: int, train_iters: int, eval_interval: int, eval_iters: int, global_batch_size: int
) -> tuple[int, int, int]:
    """The samples that a whole run draws from train, valid and test.

    Args:
        train_samples: samples of the run where it is given in samples, else 0.
        train_iters: iterations of the run.
        eval_interval: iterations between two evaluations; 0 for one at the end alone.
        eval_iters: batches an evaluation.
        global_batch_size: samples a batch.
    """
    num_evaluations = (train_iters // eval_interval if eval_interval > 0 else 0) + 1
    train = train_samples if train_samples > 0 else train_iters * global_batch_size
    return train, num_evaluations * eval_iters * global_batch_size, eval_iters * global_batch_size


def build_mock_datasets(
    seq_length: int, num_samples: tuple[int, int, int], seed: int, vocab_size: int
) -> DatasetSplits:
    """As `build_datasets`, of random tokens and without any file."""
    splits = [
        MockDataset(number, seq_length, vocab_size, seed, i) if number > 0 else None
        for i, number in enumerate(num_samples)
    ]
    return DatasetSplits(*splits)


def build_datasets(
    data_path: Sequence[str],
    split: str,
    seq_length: int,
    num_samples: tuple[int, int, int],
    seed: int,
    vocab_size: int | None = None,
) -> DatasetSplits:
    """Opens and checks the files, and orders the samples of each split.

    Each dataset holds at least the samples asked for, from as many epochs as that takes. The result depends
    on the arguments alone, so that every rank builds the same.

    Args:
        data_path: the words of --data-path: prefixes, or weight prefix weight prefix ...
        split: weights of train, valid and test, such as "949,50,1".
        seq_length: S; a sample holds S + 1 tokens.
        num_samples: asked of train, valid and test.
        seed: of the order, the same for all datasets and splits.
        vocab_size: a token id beyond it is refused when its sample is read.

    Raises:
        UserError: a file is missing or damaged, the split or the blend is malformed, a split is too small for
            one sample, or there is nothing to train on.
    """
    prefixes, weights = parse_data_path(data_path)
    if len(prefixes) > MAX_DATASETS:
        raise UserError(f"--data-path names {len(prefixes)} datasets, at most {MAX_DATASETS} can be blended")
    opened = {prefix: IndexedDataset(prefix) for prefix in dict.fromkeys(prefixes)}
    sources = [opened[prefix] for prefix in prefixes]
    ranges = [split_ranges(split, len(source)) for source in sources]
    builds = [
        _SplitBuild(
            name, sources, [r[i] for r in ranges], weights, seq_length, num_samples[i], seed, vocab_size
        ).build()
        for i, name in enumerate(SPLIT_NAMES)
    ]
    if builds[0] is None and num_samples[0] > 0:
        raise UserError(f"--split {split} leaves no sequence of {' '.join(prefixes)} to train on")
    return DatasetSplits(*builds)


@dataclass(frozen=True)
class _SplitBuild:
    """What one split is built from."""

    name: str
    sources: list[IndexedDataset]
    ranges: list[range]
    weights: list[float] | None
    seq_length: int
    num_samples: int
    seed: int
    vocab_size: int | None

    def build(self) -> Dataset | None:
        if self.num_samples == 0:
            return None
        if len(self.sources) == 1 and self.weights is None:
            return self._gpt(0, self.num_samples) if self.ranges[0] else None
        kept = self._sources_with_sequences()
        if not kept:
            return None
        if self.weights is None:
            return self._blend_by_size(kept)
        return self._blend_by_weight(kept, [self.weights[i] for i in kept])

    def _sources_with_sequences(self) -> list[int]:
        """The sources that have a part in this split; training refuses to go without one of them."""
        empty = [i for i, r in enumerate(self.ranges) if not r]
        for i in empty:
            prefix, total = self.sources[i].prefix, len(self.sources[i])
            fault = f"--split leaves none of the {total} sequences of {prefix} to the {self.name} split"
            if self.name == "train":
                raise UserError(
                    f"{fault}: give train a larger share, or leave this dataset out of --data-path"
                )
            if len(empty) < len(self.ranges):
                log.warning("%s, which blends the others in their proportions", fault)
        return [i for i, r in enumerate(self.ranges) if r]

    def _blend_by_weight(self, kept: list[int], weights: Sequence[float]) -> Dataset:
        shares = normalized(weights)
        datasets = [
            self._gpt(i, num_samples_to_build(self.num_samples, share))
            for i, share in zip(kept, shares, strict=True)
        ]
        return BlendedDataset(datasets, weights, self.num_samples)

    def _blend_by_size(self, kept: list[int]) -> Dataset:
        """Weighs each dataset by the samples of one epoch of it; repeats them only where all are too few."""
        one_epoch = [self._gpt(i, None) for i in kept]
        weights = [len(dataset) for dataset in one_epoch]
        if self.num_samples <= sum(weights):
            return BlendedDataset(one_epoch, weights, self.num_samples)
        return self._blend_by_weight(kept, weights)

    def _gpt(self, i: int, num_samples: int | None) -> GPTDataset:
        return GPTDataset(
            self.sources[i],
            self.ranges[i],
            num_samples,
            self.seq_length,
            self.seed,
            self.vocab_size,
            self.name,
        )
