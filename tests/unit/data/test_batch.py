"""Microbatches: inputs, labels and numbers."""

from __future__ import annotations

from typing import Any

import torch

from megalite.data.batch_loader import microbatch_samples, read_microbatch
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.samples import GPTSamples


def test_microbatch(write_dataset: Any) -> None:
    dataset = GPTDataset(IndexedDataset(write_dataset([50, 60])), range(2), 12, 8, seed=1)
    samples = microbatch_samples(6, 0, 3, 0, 1)
    batch = read_microbatch(dataset, samples, torch.device("cpu"), GPTSamples(8, seed=1))
    assert batch.tokens.shape == batch.labels.shape == (3, 8)
    assert batch.tokens.dtype == batch.labels.dtype == batch.sample_numbers.dtype == torch.int64
    assert batch.tokens.is_contiguous() and batch.labels.is_contiguous()
    assert batch.sample_numbers.tolist() == [6, 7, 8]
    for row, number in enumerate([6, 7, 8]):
        assert batch.tokens[row].tolist() == dataset[number][:-1].tolist()
        assert batch.labels[row].tolist() == dataset[number][1:].tolist()
