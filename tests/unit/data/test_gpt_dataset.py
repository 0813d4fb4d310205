"""Samples: the golden case, the sequential walk, hostile arrays, and what a dataset gives and refuses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.cli.datasets import compare, summarize
from megalite.data import _index_builder, storage
from megalite.data.gpt_dataset import EpochPlan, GPTDataset, gpt_index, plan_epochs
from megalite.data.indexed_dataset import IndexedDataset, IndexedWriter
from megalite.utils.errors import UserError

GOLDEN_SAMPLES = [
    [0, 0], [0, 4], [1, 1], [1, 5], [2, 2], [3, 0], [4, 1], [5, 0], [6, 2],
    [7, 0], [7, 4], [9, 0], [10, 2], [11, 1], [11, 5], [13, 1], [13, 5], [14, 2],
]  # fmt: skip


def test_golden_case() -> None:
    assert plan_epochs(23, 12, 4) == EpochPlan(num_epochs=3, num_samples=17, num_samples_before_last=11)
    index = gpt_index(np.array([5, 3, 7, 2, 6], np.int32), range(5), 12, 4, 1234)
    assert index.document_index.tolist() == [2, 2, 4, 1, 0, 3, 4, 0, 1, 3, 0, 4, 3, 2, 1]
    assert index.shuffle_index.tolist() == [3, 9, 2, 1, 7, 5, 4, 0, 8, 6, 10, 16, 12, 15, 14, 11, 13]
    assert index.sample_index.tolist() == GOLDEN_SAMPLES
    dtypes = (index.document_index.dtype, index.sample_index.dtype, index.shuffle_index.dtype)
    assert dtypes == (np.int32, np.int32, np.uint32)


def walk(lengths: list[int], documents: list[int], s: int, n: int) -> list[list[int]]:
    """Sample by sample, token by token: a sample's last token is where the next one starts."""
    rows, position, offset = [[0, 0]], 0, 0
    for _ in range(n):
        remaining = s + 1
        while remaining > lengths[documents[position]] - offset:
            remaining -= lengths[documents[position]] - offset
            position, offset = position + 1, 0
        offset += remaining - 1
        rows.append([position, offset])
    return rows


@given(data=st.data(), s=st.integers(1, 9), wide=st.booleans())
@settings(max_examples=150, deadline=None)
def test_sample_index_is_the_walk(data: st.DataObject, s: int, wide: bool) -> None:
    lengths = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=8).filter(any))
    documents = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=20))
    n = (sum(lengths[d] for d in documents) - 1) // s
    if n < 0:
        return
    index = _index_builder.build_sample_index(
        np.array(lengths, np.int32), np.array(documents, np.int32), s, n, wide
    )
    assert index.dtype == (np.int64 if wide else np.int32)
    assert index.tolist() == walk(lengths, documents, s, n)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_sample_index_of_several_threads_is_the_closed_form(dtype: type) -> None:
    """Enough documents for threads; many empty ones, and some of many samples."""
    rng = np.random.default_rng(1)
    lengths = np.where(rng.random(1000) < 0.3, 0, rng.lognormal(1, 1.5, 1000)).astype(np.int32)
    documents = rng.integers(0, 1000, 700_000).astype(dtype)
    for s in (3, 50):
        ends = np.cumsum(lengths[documents], dtype=np.int64)
        n = int(ends[-1] - 1) // s
        progress = _index_builder.Progress()
        index = _index_builder.build_sample_index(lengths, documents, s, n, progress=progress)
        assert 0 < progress.done <= len(documents)
        starts = np.arange(1, n + 1, dtype=np.int64) * s
        positions = np.searchsorted(ends, starts, side="right")
        offsets = starts - (ends - lengths[documents])[positions]
        assert index[0].tolist() == [0, 0]
        np.testing.assert_array_equal(index[1:], np.stack([positions, offsets], axis=1))
    with pytest.raises(IndexError, match="too few tokens"):
        _index_builder.build_sample_index(lengths, documents, s, n + 1)
    documents[600_000] = 1000
    with pytest.raises(IndexError, match="outside the array of lengths"):
        _index_builder.build_sample_index(lengths, documents, s, n)


def test_sample_index_of_unaligned_and_strided_arrays() -> None:
    raw = b"\0" + np.array([5, 3, 7], np.int32).tobytes()
    lengths = np.frombuffer(raw, np.int32, 3, 1)
    assert not lengths.flags.aligned
    documents = np.array([2, 9, 0, 9, 1, 9], np.int64)[::2]
    index = _index_builder.build_sample_index(lengths, documents, 4, 3)
    assert index.tolist() == walk([5, 3, 7], [2, 0, 1], 4, 3)


@pytest.mark.parametrize(
    ("lengths", "documents", "s", "n"),
    [
        ([5], [0, 1], 4, 2),
        ([5], [-1], 4, 1),
        ([5, -3], [1, 0], 4, 1),
        ([5], [0], 4, 2),
        ([5], [], 4, 1),
        ([5], [0], 0, 1),
        ([5], [0], -4, 1),
        ([5], [0], 2**62, 1),
        ([5], [0], 4, -2),
        ([5], [0], 4, 2**62),
        ([5.0], [0], 4, 1),
        ([[5]], [0], 4, 1),
    ],
)
def test_sample_index_refuses_hostile_arrays(
    lengths: list[Any], documents: list[int], s: int, n: int
) -> None:
    lengths_array = np.array(lengths)
    if lengths_array.dtype.kind == "i":
        lengths_array = lengths_array.astype(np.int32)
    with pytest.raises((IndexError, ValueError)):
        _index_builder.build_sample_index(lengths_array, np.array(documents, np.int32), s, n)


@pytest.mark.parametrize("outside", [-1, 1])
def test_sample_index_reads_no_neighbouring_memory(outside: int) -> None:
    one = np.array([9, 5, 9], np.int32)[1:2]
    with pytest.raises(IndexError, match="outside the array of lengths"):
        _index_builder.build_sample_index(one, np.array([outside], np.int32), 4, 1)


def test_enough_samples_for_any_number(write_dataset: Any) -> None:
    indexed = IndexedDataset(write_dataset([4, 0, 9, 1]))
    for num_samples in (1, 2, 3, 4, 5, 6, 50):
        dataset = GPTDataset(indexed, range(4), num_samples, 4, seed=1)
        assert len(dataset) >= num_samples
        assert sorted(dataset.index.shuffle_index.tolist()) == list(range(len(dataset)))
    assert len(GPTDataset(indexed, range(4), None, 4, seed=1)) == 3


def test_samples_are_consecutive_tokens_of_the_stream(write_dataset: Any) -> None:
    indexed = IndexedDataset(write_dataset([4, 0, 9, 1, 30]))
    dataset = GPTDataset(indexed, range(5), 25, 6, seed=3)
    stream = np.concatenate([indexed[d] for d in dataset.index.document_index])
    for i in range(len(dataset)):
        start = int(dataset.index.shuffle_index[i]) * 6
        assert dataset[i].dtype == np.int64
        np.testing.assert_array_equal(dataset[i], stream[start : start + 7])
    for outside in (-1, len(dataset)):
        with pytest.raises(IndexError):
            dataset[outside]


def test_too_few_tokens_are_named(write_dataset: Any) -> None:
    prefix = write_dataset([4, 3, 100])
    with pytest.raises(
        UserError, match=f"valid split of {prefix} holds 7 tokens in 2 sequences.* the 8 of one"
    ):
        GPTDataset(IndexedDataset(prefix), range(2), 10, 7, seed=1, split_name="valid")


@pytest.mark.parametrize("wrong", [100, -1])
def test_token_outside_the_vocabulary_is_named(tmp_path: Any, wrong: int) -> None:
    prefix = str(tmp_path / "d")
    with IndexedWriter(prefix, "int32") as writer:
        writer.add_document([[0, 1], [2]])
        writer.add_document([[3, 99, wrong, 4]])
    dataset = GPTDataset(IndexedDataset(prefix), range(3), 1, 6, seed=1, vocab_size=100)
    with pytest.raises(UserError, match=f"document 1 of {prefix} has token id {wrong}, outside.* of 100:"):
        dataset[0]
    assert len(GPTDataset(IndexedDataset(prefix), range(3), 1, 6, seed=1)[0]) == 7


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64])
@pytest.mark.parametrize("seed", [0, 1234, 2**32 - 1])
def test_shuffle_is_numpys(dtype: type, seed: int) -> None:
    """Sizes around powers of two, where the mask of the draws changes, and around a block of draws."""
    for size in (0, 1, 2, 3, 4, 5, 127, 128, 129, 255, 256, 257, 258, 1025, 70_000):
        theirs, ours = np.random.RandomState(seed), _index_builder.LegacyRandom(seed)
        for epochs in (1, 3):  # the second continues with the first's generator
            expected = np.tile(np.arange(7, 7 + size, dtype=dtype), epochs)
            theirs.shuffle(expected)
            out = np.full(epochs * size, 99, dtype)
            ours.fill_shuffled(out, 7, 7 + size)
            np.testing.assert_array_equal(out, expected)


def test_shuffle_refuses_hostile_arguments() -> None:
    random = _index_builder.LegacyRandom(1)
    frozen = np.empty(4, np.int32)
    frozen.flags.writeable = False
    for out, start, stop in (
        (np.empty(4, np.float32), 0, 4),
        (np.empty(4, np.int16), 0, 4),
        (np.empty((2, 2), np.int32), 0, 4),
        (np.empty(8, np.int32)[::2], 0, 4),
        (np.empty(4, ">i4"), 0, 4),
        (np.empty(17, np.uint8)[1:].view(np.int32), 0, 4),
        (np.empty(4, np.int32), 0, 3),
        (np.empty(4, np.int32), 2, 2),
        (np.empty(4, np.int32), 4, 0),
        (np.empty(4, np.int32), 2**31 - 3, 2**31 + 1),
        (frozen, 0, 4),
    ):
        with pytest.raises(ValueError, match=r"out |start |writeable"):
            random.fill_shuffled(out, start, stop)
    for seed in (-1, 2**32):
        with pytest.raises(ValueError, match="seed"):
            _index_builder.LegacyRandom(seed)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint16", "int32", "int64"])
def test_gathered_samples_are_those_of_the_walk(tmp_path: Any, dtype: str) -> None:
    """Negative and largest tokens too, samples in any order, more than once, and none at all."""
    rng = np.random.default_rng(3)
    prefix, lengths = str(tmp_path / "d"), [4, 0, 9, 1, 30, 0]
    info = np.iinfo(dtype)
    with IndexedWriter(prefix, dtype) as writer:
        writer.add_documents(rng.integers(info.min, info.max, 44, dtype, endpoint=True), np.array(lengths))
    indexed = IndexedDataset(prefix)
    dataset = GPTDataset(indexed, range(6), 25, 6, seed=3)
    stream = np.concatenate([indexed[d] for d in dataset.index.document_index]).astype(np.int64)
    samples = np.array([3, 0, len(dataset) - 1, 3], np.int64)
    starts = dataset.index.shuffle_index[samples].astype(int) * 6
    expected = np.stack([stream[start : start + 7] for start in starts])
    np.testing.assert_array_equal(dataset.gather(samples), expected)
    assert dataset.gather(samples[:0]).shape == (0, 7)
    for outside in (-1, len(dataset)):
        with pytest.raises(IndexError):
            dataset.gather(np.array([0, outside]))


@pytest.mark.parametrize("ending", [".bin", ".idx"])
@pytest.mark.parametrize("part", ["all of it", "whole pages", "one byte"])
def test_a_file_cut_while_it_is_read_is_named(
    write_dataset: Any, monkeypatch: pytest.MonkeyPatch, ending: str, part: str
) -> None:
    """Reading a mapped file that became shorter ends a process by SIGBUS, or finds zeros in its last page."""
    monkeypatch.setattr(storage, "STATUS_AGE_MS", 0)
    prefix = write_dataset([10] * 3000)
    indexed = IndexedDataset(prefix)
    dataset = GPTDataset(indexed, range(3000), 100, 64, seed=3)
    path = f"{prefix}{ending}"
    num_bytes = os.path.getsize(path)
    os.truncate(path, {"all of it": 0, "whole pages": 5000, "one byte": num_bytes - 1}[part])
    said = f"{path} became shorter or unreadable while it was in use: it had {num_bytes} bytes"
    with pytest.raises(UserError, match=said):
        dataset.gather(np.arange(100))
    os.truncate(path, num_bytes)
    with pytest.raises(UserError, match=path):  # what was read as zeros stays zeros
        dataset.gather(np.arange(100))
    for read in (lambda: indexed[2999], lambda: summarize(indexed), lambda: compare(indexed, indexed)):
        os.truncate(path, num_bytes - 1)
        with pytest.raises(UserError, match=said):
            read()


def test_a_file_replaced_while_it_is_read_stays_what_it_was(write_dataset: Any) -> None:
    prefix = write_dataset([10] * 3000)
    indexed = IndexedDataset(prefix)
    for ending in (".bin", ".idx"):
        with open(f"{prefix}.new", "wb") as file:
            file.write(b"short")
        os.replace(f"{prefix}.new", f"{prefix}{ending}")
    assert indexed[2999].tolist() == list(range(29990, 30000))


def test_any_other_bus_error_ends_the_process(write_dataset: Any) -> None:
    program = (
        "import mmap, os, signal, sys; from megalite.data.indexed_dataset import IndexedDataset\n"
        "IndexedDataset(sys.argv[1])\n"
        "if sys.argv[2] == 'sent': os.kill(os.getpid(), signal.SIGBUS)\n"
        "file = open(sys.argv[1] + '.bin', 'r+b'); memory = mmap.mmap(file.fileno(), 0)\n"
        "file.truncate(0); print(memory[0])\n"
    )
    for kind in ("sent", "fault"):
        command = [sys.executable, "-c", program, write_dataset([5], kind), kind]
        assert subprocess.run(command, capture_output=True).returncode == -signal.SIGBUS


GATHER: dict[str, Any] = {
    "tokens": np.arange(9, dtype=np.uint16),
    "sequence_offsets": np.array([0, 10]),
    "sequence_lengths": np.array([5, 4], np.int32),
    "document_index": np.array([1, 0], np.int32),
    "sample_index": np.array([0, 0, 1, 0, 1, 4], np.int32),
    "rows": np.array([1, 0]),
    "out": np.zeros((2, 5), np.int64),
}


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": np.arange(9.0)},
        {"tokens": np.arange(9, dtype=">i4")},
        {"tokens": np.arange(18, dtype=np.uint16)[::2]},
        {"tokens": np.arange(4, dtype=np.uint16)},
        {"sequence_offsets": np.array([0])},
        {"sequence_offsets": np.array([-2, 10])},
        {"sequence_offsets": np.array([2**62, 10])},
        {"sequence_lengths": np.array([-5, 4], np.int32)},
        {"document_index": np.array([1, 2], np.int32)},
        {"document_index": np.array([1, -1], np.int32)},
        {"document_index": np.array([1], np.int32)},
        {"sample_index": np.array([0, 0, 1, -3, 1, 4], np.int32)},
        {"sample_index": np.array([0, 0, 1, 6, 1, 4], np.int32)},
        {"sample_index": np.array([0, 0, -1, 0, 1, 4], np.int32)},
        {"rows": np.array([2, 0])},
        {"rows": np.array([-1, 0])},
        {"out": np.zeros((2, 99), np.int64)},
        {"out": np.zeros((1, 5), np.int64)},
    ],
    ids=lambda change: " ".join(f"{name} {values.tolist()[:2]}" for name, values in change.items()),
)
def test_gather_refuses_hostile_arrays(change: dict[str, Any]) -> None:
    def gather(tokens: Any, sequence_offsets: Any, sequence_lengths: Any, **rest: Any) -> tuple[int, int]:
        return _index_builder.TokenSource([(tokens, sequence_offsets, sequence_lengths)]).gather_samples(
            **rest
        )

    assert gather(**GATHER) == (0, 8)
    assert GATHER["out"].tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 0]]
    with pytest.raises((IndexError, ValueError)):
        gather(**{**GATHER, **change})


def test_spans_of_parts_are_those_of_the_joined_tokens() -> None:
    lengths, tokens = (3, 0, 0, 1, 5, 0), np.arange(9, dtype=np.uint16)
    ends = np.cumsum(lengths)
    parts = [
        (tokens[end - n : end], np.zeros(0, int), np.zeros(0, int))
        for n, end in zip(lengths, ends, strict=True)
    ]
    source = _index_builder.TokenSource(parts)
    for width in range(10):
        out = np.empty((10 - width, width), np.int64)
        source.gather_spans(np.arange(10 - width), out)
        assert out.tolist() == [tokens[i : i + width].tolist() for i in range(10 - width)]
        for outside in (-1, 10 - width):
            with pytest.raises(IndexError):
                source.gather_spans(np.array([outside]), np.empty((1, width), np.int64))


def test_parts_of_a_corpus_are_of_one_type() -> None:
    parts = [(np.zeros(1, dtype), np.zeros(0, int), np.zeros(0, int)) for dtype in ("uint16", "int32")]
    with pytest.raises(ValueError, match="one type"):
        _index_builder.TokenSource(parts)
