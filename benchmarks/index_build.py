#!/usr/bin/env python
"""Time building a corpus's index and a blend's order without a cache, as ratios to megatron-core.

python benchmarks/index_build.py --documents 10000000
python benchmarks/index_build.py --documents --blends 8 64 512

The documents have lengths like web text. Both programs must give the same three arrays. Only the arrays are
timed, in turns, so that other processes slow both; the ratio is the ratio of medians. For megatron-core we
time the functions of its GPTDataset without a cache: _build_document_index, build_sample_idx and
_build_shuffle_index. For a blend we time build_blending_indices, on weights spread like sizes of corpora.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from megalite.data import _index_builder
from megalite.data.blend import normalized
from megalite.data.gpt_dataset import EpochPlan, GPTIndex, gpt_index, plan_epochs

SEED = 1234


def web_lengths(num_documents: int) -> npt.NDArray[np.int32]:
    """Log-normal lengths with a mean of about 800 tokens, some of them zero."""
    rng = np.random.default_rng(SEED)
    return rng.lognormal(6.2, 1.0, num_documents).astype(np.int32)


def megatron_index(lengths: npt.NDArray[np.int32], plan: EpochPlan, seq_length: int) -> GPTIndex:
    """Return the arrays by megatron-core's functions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets import gpt_dataset, helpers

    rng = np.random.RandomState(SEED)
    before = plan.num_samples_before_last
    ids = np.arange(len(lengths), dtype=np.int32)
    tokens = int(np.sum(lengths[ids]))
    documents = gpt_dataset._build_document_index(ids, plan.num_epochs, rng, before is not None)
    samples = helpers.build_sample_idx(lengths, documents, seq_length, plan.num_epochs, tokens)
    n = len(samples) - 1
    shuffle = gpt_dataset._build_shuffle_index(n if before is None else before, n, rng)
    return GPTIndex(documents, samples, shuffle)


def seconds(build: Callable[[], object]) -> float:
    """Return the seconds of one build."""
    start = time.perf_counter()
    build()
    return time.perf_counter() - start


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the corpus and how often it is indexed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--documents", type=int, nargs="*", default=[1_000_000, 10_000_000])
    parser.add_argument("--blends", type=int, nargs="*", default=[], help="numbers of datasets to blend")
    parser.add_argument("--blend-samples", type=int, default=1_000_000)
    parser.add_argument("--epochs", type=float, default=1.0, help="samples asked for, in epochs")
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--alone", action="store_true", help="time megalite only, and tell its peak of memory"
    )
    return parser.parse_args(arguments)


def compare(num_documents: int, options: argparse.Namespace) -> None:
    """Print one corpus's line."""
    lengths, s = web_lengths(num_documents), options.seq_length
    tokens = int(lengths.sum(dtype=np.int64))
    num_samples = int((tokens - 1) // s * options.epochs)
    plan = plan_epochs(tokens, num_samples, s)

    def ours() -> GPTIndex:
        return gpt_index(lengths, range(num_documents), num_samples, s, SEED)

    def theirs() -> GPTIndex:
        return megatron_index(lengths, plan, s)

    size = f"{num_documents:,} documents, {plan.num_epochs} epoch(s), {plan.num_samples:,} samples"
    if options.alone:
        took = statistics.median(seconds(ours) for _ in range(options.repeats))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"{size}: megalite {took:.2f} s, peak of the process {peak:.2f} GiB")
        return
    mine, other = ours(), theirs()
    for name in ("document_index", "sample_index", "shuffle_index"):
        assert np.array_equal(getattr(mine, name), getattr(other, name)), name
    del mine, other
    print(f"{size}: {in_turns(ours, theirs, options.repeats)}")


def in_turns(ours: Callable[[], object], theirs: Callable[[], object], repeats: int) -> str:
    """Return the medians of both and their ratio."""
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(repeats)]
    a, b = (statistics.median(column) for column in zip(*pairs, strict=True))
    return f"megalite {a:.3f} s, megatron-core {b:.3f} s, ratio {b / a:.1f}"


def compare_blends(num_datasets: int, options: argparse.Namespace) -> None:
    """Print one blend's line."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets import helpers

    n = options.blend_samples
    weights = normalized(np.random.default_rng(SEED).lognormal(0, 1.5, num_datasets).tolist())

    def ours() -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
        return _index_builder.build_blend_index(weights, n)

    def theirs() -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
        datasets, samples = np.zeros(n, np.int16), np.zeros(n, np.int64)
        helpers.build_blending_indices(datasets, samples, weights, num_datasets, n, False)
        return datasets, samples

    assert all(np.array_equal(a, b) for a, b in zip(ours(), theirs(), strict=True))
    print(f"{num_datasets} datasets, {n:,} samples: {in_turns(ours, theirs, options.repeats)}")


if __name__ == "__main__":
    given = parse()
    for number in given.documents:
        compare(number, given)
    for number in given.blends:
        compare_blends(number, given)
