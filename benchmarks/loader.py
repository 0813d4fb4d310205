#!/usr/bin/env python
"""Tokens per second of one core that reads samples, from a corpus in the page cache.

python benchmarks/loader.py --seq-length 2048 --micro-batch-size 4

Ways to the same microbatches, in turns: samples in one C++ call a microbatch, of the corpus in one file and
in shards, samples one by one, and megatron-core's GPTDataset where it is installed, stacked into a batch;
tensors of inputs and labels in all. Windows are other samples of the same two corpora.
The thread is bound to one core, and reads in the order of training, at random places of the file.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from megalite.data.batch_loader import read_microbatch
from megalite.data.dataset_merge import list_shards
from megalite.data.gpt_dataset import Dataset, GPTDataset
from megalite.data.indexed_dataset import IndexedDataset, IndexedWriter
from megalite.data.microbatch import Microbatch
from megalite.data.samples import GPTSamples
from megalite.data.sharded_dataset import open_dataset
from megalite.data.window_dataset import WindowDataset

SEED = 1234
CPU = torch.device("cpu")


def write_corpus(prefix: str, num_tokens: int, seed: int = SEED) -> None:
    """Random uint16 tokens in documents of about 800."""
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(6.2, 1.0, num_tokens // 800).astype(np.int32) + 1
    with IndexedWriter(prefix, "uint16") as writer:
        writer.add_documents(rng.integers(0, 50000, lengths.sum(), dtype=np.uint16), lengths)


def write_shards(prefix: str, count: int) -> str:
    """Write the corpus of a prefix again, in shards, and return the prefix of their list."""
    source, names = IndexedDataset(prefix), []
    for part in np.array_split(np.arange(len(source)), count):
        names.append(f"{prefix}-{part[0]}")
        with IndexedWriter(names[-1], source.dtype) as writer:
            writer.add_documents(
                source.read_tokens(source.first_token(part[0]), source.first_token(part[-1] + 1)),
                source.sequence_lengths[part[0] : part[-1] + 1],
            )
    list_shards(names, f"{prefix}-list")
    return f"{prefix}-list"


def megatron_dataset(prefix: str, num_samples: int, seq_length: int) -> Any:
    """Return megatron-core's dataset of the same samples; None if it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from megatron.core.datasets import gpt_dataset, indexed_dataset
            from megatron.core.datasets.utils import Split
        except ImportError:
            return None
        config = gpt_dataset.GPTDatasetConfig(
            random_seed=SEED,
            sequence_length=seq_length,
            blend=([prefix], None),
            split="1",
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
            tokenizer=SimpleNamespace(eod=50000, pad=50001, vocab_size=50002, unique_identifiers={}),
            path_to_cache=f"{prefix}-cache",
        )
        source = indexed_dataset.IndexedDataset(prefix)
        ids = np.arange(len(source), dtype=np.int32)
        return gpt_dataset.GPTDataset(source, prefix, ids, num_samples, Split.train, config)


def ways(
    prefix: str, num_samples: int, seq_length: int, shards: int
) -> dict[str, Callable[[np.ndarray], Any]]:
    """Return the loaders to compare: each takes sample numbers and returns inputs and labels."""
    sources = {"": IndexedDataset(prefix), f", {shards} shards": open_dataset(write_shards(prefix, shards))}
    arguments = num_samples, seq_length, SEED, 50002
    of_files = {
        f"{kind}{name}": build(source, range(len(source)), *arguments)
        for name, source in sources.items()
        for kind, build in (("one C++ call", GPTDataset), ("windows", WindowDataset))
    }
    dataset = of_files["one C++ call"]
    theirs = megatron_dataset(prefix, num_samples, seq_length)

    def gathered(dataset: Dataset, samples: np.ndarray) -> Microbatch:
        return read_microbatch(dataset, CPU, GPTSamples(0, seed=0), None, samples)

    def one_by_one(samples: np.ndarray) -> Microbatch:
        text = torch.from_numpy(np.stack([dataset[i] for i in samples.tolist()]))
        return Microbatch(text[:, :-1].contiguous(), text[:, 1:].contiguous(), torch.from_numpy(samples))

    def megatron(samples: np.ndarray) -> Microbatch:
        items = [theirs[i] for i in samples.tolist()]
        tokens, labels = (torch.stack([item[name] for item in items]) for name in ("tokens", "labels"))
        return Microbatch(tokens, labels, torch.from_numpy(samples))

    mine: dict[str, Callable[[np.ndarray], Any]] = {
        name: partial(gathered, each) for name, each in of_files.items()
    }
    mine["one by one"] = one_by_one
    return mine if theirs is None else {**mine, "megatron-core": megatron}


def tokens_per_second(read: Callable[[np.ndarray], Any], num_samples: int, b: int, seq_length: int) -> float:
    """Return the rate over all samples, in microbatches of b."""
    start = time.perf_counter()
    for first in range(0, num_samples - b + 1, b):
        read(np.arange(first, first + b))
    return num_samples // b * b * seq_length / (time.perf_counter() - start)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the corpus and the batches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=50_000_000)
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4096, help="read in each turn")
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args(arguments)


def main() -> None:
    """Print a line for each way."""
    given = parse()
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory() as folder:
        prefix = str(Path(folder) / "corpus")
        write_corpus(prefix, given.tokens)
        readers = ways(prefix, given.samples, given.seq_length, given.shards)
        first = {name: read(np.arange(given.micro_batch_size)).labels for name, read in readers.items()}
        for name, labels in first.items():
            assert torch.equal(labels, first["windows" if name.startswith("windows") else "one C++ call"])
        rates: dict[str, list[float]] = {name: [] for name in readers}
        for _ in range(given.repeats + 1):  # the first turn warms the page cache
            for name, read in readers.items():
                batch, s = given.micro_batch_size, given.seq_length
                rates[name].append(tokens_per_second(read, given.samples, batch, s))
    medians = {name: statistics.median(turns[1:]) for name, turns in rates.items()}
    best = medians["one C++ call"]
    for name, rate in medians.items():
        print(f"{name}: {rate / 1e6:.1f} million tokens/s, one C++ call is {best / rate:.1f} x as fast")


if __name__ == "__main__":
    main()
