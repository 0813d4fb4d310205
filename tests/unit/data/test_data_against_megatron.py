"""Files, sample order, splits and blends against megatron-core's own classes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megalite.data import _index_builder
from megalite.data.blend import normalized
from megalite.data.file_ranges import HEADER, MAGIC, VERSION
from megalite.data.gpt_dataset import GPTDataset, gpt_index, plan_epochs
from megalite.data.indexed_dataset import IndexedDataset, IndexedWriter
from tests.corpora import build_datasets, split_ranges

pytest.importorskip("megatron.core.datasets.helpers_cpp", reason="megatron-core is not installed")

from megatron.core.datasets import gpt_dataset, helpers, indexed_dataset
from megatron.core.datasets.blended_megatron_dataset_builder import (
    BlendedMegatronDatasetBuilder,
)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "int64", "uint16"])
def test_reads_megatrons_files(tmp_path: Path, dtype: str) -> None:
    builder = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "m.bin"), dtype=np.dtype(dtype).type)
    builder.add_document(np.arange(5), [2, 3])
    builder.add_document(np.arange(4), [4])
    builder.finalize(str(tmp_path / "m.idx"))
    dataset = IndexedDataset(tmp_path / "m")
    assert [dataset[i].tolist() for i in range(3)] == [[0, 1], [2, 3, 4], [0, 1, 2, 3]]
    assert dataset.document_index.tolist() == [0, 2, 3]
    assert dataset.dtype == np.dtype(dtype)


def test_megatron_reads_our_files(write_dataset: Any) -> None:
    theirs = indexed_dataset.IndexedDataset(write_dataset([3, 0, 2], dtype="int32"))
    assert [theirs[i].tolist() for i in range(3)] == [[0, 1, 2], [], [3, 4]]
    assert theirs.document_indices.tolist() == [0, 1, 2, 3]
    assert theirs.index.dtype == np.int32


def megatron_index(
    lengths: np.ndarray, documents: range, num_samples: int, s: int, seed: int
) -> list[np.ndarray]:
    """The arrays from megatron-core's functions; `test_whole_datasets` compares the plan of epochs."""
    tokens = int(lengths[documents.start : documents.stop].sum())
    plan = plan_epochs(tokens, num_samples, s)
    rng = np.random.RandomState(seed)
    apart = plan.num_samples_before_last is not None
    ids = np.arange(documents.start, documents.stop, dtype=np.int32)
    order = gpt_dataset._build_document_index(ids, plan.num_epochs, rng, apart)
    samples = helpers.build_sample_idx(lengths, order, s, plan.num_epochs, tokens)
    n = len(samples) - 1
    shuffle = gpt_dataset._build_shuffle_index(plan.num_samples_before_last if apart else n, n, rng)
    return [order, samples, shuffle]


@pytest.mark.parametrize("num_documents", [1, 2, 7, 60])
@pytest.mark.parametrize("s", [2, 5, 32])
def test_index_arrays(num_documents: int, s: int) -> None:
    for max_length, num_samples, seed in itertools.product([3, 40], [1, 13, 200], [1, 1234]):
        rng = np.random.default_rng([num_documents, s, max_length, num_samples])
        lengths = rng.integers(0, max_length, num_documents + 2).astype(np.int32)
        lengths[1] = max(2, lengths[1])
        documents = range(1, num_documents + 1)
        ours = gpt_index(lengths, documents, num_samples, s, seed)
        theirs = megatron_index(lengths, documents, num_samples, s, seed)
        for mine, other in zip(
            (ours.document_index, ours.sample_index, ours.shuffle_index), theirs, strict=True
        ):
            assert mine.dtype == other.dtype
            np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("num_datasets", [1, 2, 3, 10])
def test_blend_order(num_datasets: int) -> None:
    rng = np.random.default_rng(num_datasets)
    for raw in (rng.random(num_datasets), rng.integers(1, 4, num_datasets)):
        weights, size = normalized(raw.tolist()), 3000
        datasets, samples = np.zeros(size, np.int16), np.zeros(size, np.int64)
        helpers.build_blending_indices(datasets, samples, weights, num_datasets, size, False)
        ours = _index_builder.build_blend_index(weights, size)
        np.testing.assert_array_equal(ours[0], datasets)
        np.testing.assert_array_equal(ours[1], samples)


class _Tokenizer(SimpleNamespace):
    """What megatron-core's config wants of a tokenizer; an id that no dataset here holds pads."""

    @property
    def unique_identifiers(self) -> dict[str, str]:
        return {}


def megatron_splits(
    words: Sequence[str], split: str, s: int, sizes: tuple[int, int, int], seed: int
) -> list[Any]:
    from megatron.core.datasets.utils import get_blend_from_list

    config = gpt_dataset.GPTDatasetConfig(
        random_seed=seed,
        sequence_length=s,
        blend=get_blend_from_list(list(words)),
        split=split,
        tokenizer=_Tokenizer(vocab_size=65536, eod=65535, pad=65534, special_tokens_dict={}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        num_dataset_builder_threads=1,
    )
    return list(
        BlendedMegatronDatasetBuilder(gpt_dataset.GPTDataset, list(sizes), lambda: True, config).build()
    )


def as_sample(item: dict[str, Any]) -> np.ndarray:
    return np.concatenate([item["tokens"].numpy(), item["labels"].numpy()[-1:]])


@pytest.mark.parametrize("split", ["949,50,1", "90,5,5", "0.6,0.3,0.1", "1", "2,0,1"])
@pytest.mark.parametrize("num_sequences", [1, 10, 37, 1001])
def test_split_boundaries(split: str, num_sequences: int) -> None:
    from megatron.core.datasets import blended_megatron_dataset_config as theirs

    matrix = theirs.convert_split_vector_to_split_matrix(theirs.parse_and_normalize_split(split))
    for ours, bounds in zip(split_ranges(split, num_sequences), matrix, strict=True):
        if bounds is None:
            assert len(ours) == 0
        else:
            assert (ours.start, ours.stop) == tuple(round(b * float(num_sequences)) for b in bounds)


@pytest.mark.parametrize(
    "weights",
    [None, (None, None), (0.3, 0.7), (5, 2), (1.0,)],
    ids=["single", "by size", "0.3 0.7", "5 2", "1.0"],
)
@pytest.mark.parametrize("num_train", [3, 17, 60])
def test_whole_datasets(write_dataset: Any, weights: Any, num_train: int) -> None:
    """Every sample that a run draws, from files to tokens: epochs 1 to many, the last apart or not."""
    rng = np.random.default_rng(5)
    prefixes = [
        write_dataset(rng.integers(1, 30, 40).tolist(), "a"),
        write_dataset(rng.integers(1, 30, 30).tolist(), "b", first=10000),
    ]
    if weights is None:
        words = prefixes[:1]
    elif weights[0] is None:
        words, num_train = (
            prefixes,
            min(num_train, 50),
        )  # beyond one epoch megatron-core returns fewer than requested
    else:
        words = [
            word for weight, prefix in zip(weights, prefixes, strict=False) for word in (str(weight), prefix)
        ]
    sizes = (num_train, 4, 2)
    theirs = megatron_splits(words, "70,20,10", 12, sizes, 99)
    ours = build_datasets(words, "70,20,10", 12, sizes, 99, vocab_size=20000)
    for mine, other, size in zip((ours.train, ours.valid, ours.test), theirs, sizes, strict=True):
        assert mine is not None
        assert len(mine) >= size
        for i in range(size):
            np.testing.assert_array_equal(mine[i], as_sample(other[i]))


def test_epochs(write_dataset: Any) -> None:
    """The three arrays for one to many epochs, the last one shuffled apart or not."""
    lengths = np.random.default_rng(6).integers(1, 30, 40)
    prefix = write_dataset(lengths.tolist())
    num_apart = 0
    for num_samples in range(1, 200, 3):
        (theirs, _, _) = megatron_splits([prefix], "1", 12, (num_samples, 0, 0), 99)
        ours = build_datasets([prefix], "1", 12, (num_samples, 0, 0), 99).train
        assert isinstance(ours, GPTDataset)
        np.testing.assert_array_equal(ours.index.document_index, theirs.document_index)
        np.testing.assert_array_equal(ours.index.sample_index, theirs.sample_index)
        np.testing.assert_array_equal(ours.index.shuffle_index, theirs.shuffle_index)
        boundary = plan_epochs(lengths.sum(), num_samples, 12).num_samples_before_last
        num_apart += boundary is not None
    assert 20 < num_apart < 60


def test_beyond_two_to_the_31_tokens(tmp_path: Path) -> None:
    """A sparse corpus of 5 billion tokens, of which two epochs are drawn: arrays, and tokens at its end."""
    lengths = np.full(5, 10**9, np.int32)
    lengths[3] = 0
    lengths = np.append(lengths, np.int32(10**9 + 7))
    with IndexedWriter(str(tmp_path / "d"), "uint8") as writer:
        writer.add_document([[0]])
    num_tokens = int(lengths.sum(dtype=np.int64))
    with open(tmp_path / "d.bin", "r+b") as file:
        file.truncate(num_tokens)
        file.seek(num_tokens - 3)
        file.write(bytes([7, 8, 9]))
    offsets = np.cumsum(np.append(0, lengths[:-1]), dtype=np.int64)
    header = HEADER.pack(MAGIC, VERSION, 1, len(lengths), len(lengths) + 1)
    arrays = (lengths, offsets, np.arange(len(lengths) + 1, dtype=np.int64))
    (tmp_path / "d.idx").write_bytes(header + b"".join(array.tobytes() for array in arrays))
    source, s = IndexedDataset(tmp_path / "d"), 10**7
    num_samples = num_tokens // s + 100
    mine = GPTDataset(source, range(6), num_samples, s, 5)
    theirs = megatron_index(lengths, range(6), num_samples, s, 5)
    for name, other in zip(("document_index", "sample_index", "shuffle_index"), theirs, strict=True):
        ours = getattr(mine.index, name)
        assert ours.dtype == other.dtype
        np.testing.assert_array_equal(ours, other)
    position = mine.index.document_index.tolist().index(5)
    row = int(np.searchsorted(mine.index.sample_index[:, 0], position, side="right")) - 1
    sample = int(np.flatnonzero(mine.index.shuffle_index == row)[0])
    last = 10**9 + 7 - int(mine.index.sample_index[row, 1])
    assert mine[sample][last - 3 : last].tolist() == [7, 8, 9]
