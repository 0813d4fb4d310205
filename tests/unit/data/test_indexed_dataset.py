"""The .bin/.idx reader and writer: the format's bytes, round trips, and files that are not what they say."""

from __future__ import annotations

import os
import struct
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data import file_ranges
from megalite.data.indexed_dataset import IndexedDataset, IndexedWriter, token_dtype
from megalite.utils.errors import UserError

EXAMPLE_IDX = b"".join(
    (
        b"MMIDIDX\0\0",
        struct.pack("<QBQQ", 1, 8, 3, 3),
        struct.pack("<3i", 3, 1, 2),
        struct.pack("<3q", 0, 6, 8),
        struct.pack("<3q", 0, 2, 3),
    )
)
EXAMPLE_BIN = struct.pack("<6H", 1, 2, 3, 4, 5, 6)
"""Of [[[1, 2, 3], [4]], [[5, 6]]] as uint16."""

DTYPES = ["uint8", "int8", "int16", "int32", "int64", "uint16"]


def write(prefix: str, documents: list[list[list[int]]], dtype: str = "uint16") -> str:
    with IndexedWriter(prefix, dtype) as writer:
        for sequences in documents:
            writer.add_document(sequences)
    return prefix


@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 127), max_size=5), max_size=3), max_size=6),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=60, deadline=None)
def test_round_trip(documents: list[list[list[int]]], dtype: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        dataset = IndexedDataset(write(f"{folder}/d", documents, dtype))
        sequences = [sequence for document in documents for sequence in document]
        assert dataset.dtype == np.dtype(dtype)
        assert [dataset[i].tolist() for i in range(len(dataset))] == sequences
        assert dataset.num_tokens == sum(map(len, sequences))
        assert np.diff(dataset.document_index).tolist() == [len(document) for document in documents]
        owners = [number for number, document in enumerate(documents) for _ in document]
        assert [dataset.document_of(i) for i in range(len(sequences))] == owners


def test_bytes_are_the_format(tmp_path: Path) -> None:
    prefix = write(str(tmp_path / "d"), [[[1, 2, 3], [4]], [[5, 6]]])
    assert Path(f"{prefix}.idx").read_bytes() == EXAMPLE_IDX
    assert Path(f"{prefix}.bin").read_bytes() == EXAMPLE_BIN


@pytest.mark.parametrize(("vocab_size", "name"), [(257, "uint16"), (65499, "uint16"), (65500, "int32")])
def test_token_dtype(vocab_size: int, name: str) -> None:
    assert token_dtype(vocab_size).name == name


def test_bulk_equals_one_by_one(tmp_path: Path) -> None:
    one = write(str(tmp_path / "one"), [[[1, 2]], [[]], [[3]]])
    with IndexedWriter(str(tmp_path / "bulk"), "uint16") as writer:
        writer.add_documents(np.array([1, 2]), np.array([2, 0]))
        writer.add_documents(np.array([3]), np.array([1]))
    for extension in ("bin", "idx"):
        assert Path(f"{one}.{extension}").read_bytes() == (tmp_path / f"bulk.{extension}").read_bytes()


def test_failure_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with IndexedWriter(str(tmp_path / "d"), "uint16") as writer:
            writer.add_document([[1, 2]])
            assert not (tmp_path / "d.bin").exists()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_existing_output_is_kept_without_overwrite(tmp_path: Path) -> None:
    prefix = write(str(tmp_path / "d"), [[[1]]])
    with pytest.raises(UserError, match=r"d\.bin exists.*--overwrite"):
        IndexedWriter(prefix, "uint16")
    with IndexedWriter(prefix, "int32", overwrite=True) as writer:
        writer.add_document([[7, 8]])
    assert IndexedDataset(prefix)[0].tolist() == [7, 8]
    assert len(list(tmp_path.iterdir())) == 2


def test_writer_refuses_what_does_not_fit(tmp_path: Path) -> None:
    for token in (65536, -1):
        with pytest.raises(UserError, match=f"{token} does not fit into uint16"):
            write(str(tmp_path / "d"), [[[1, token]]])
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        IndexedWriter(str(tmp_path / "file" / "d"), "uint16")


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write(str(tmp_path / "d"), [[[1, 2, 3], [4]], [[5, 6]]])


HEADER, LENGTHS, OFFSETS, DOCUMENTS = 0, 34, 34 + 12, 34 + 12 + 24


def test_damage_in_the_middle_is_found_where_it_is_read(prefix: str) -> None:
    """Without the check of the index, which opens a corpus of any size in the same time."""
    with open(f"{prefix}.idx", "r+b") as file:
        file.seek(OFFSETS + 8)
        file.write(struct.pack("<q", -2))
    corpus = IndexedDataset(prefix, checks_index=False)
    assert corpus.count_tokens(range(len(corpus))) == corpus.num_tokens
    with pytest.raises(UserError, match=r"is damaged: sequence 1 begins at token -1 of"):
        corpus.count_tokens(range(1, 2))


@pytest.mark.parametrize(
    ("at", "data", "message"),
    [
        (0, b"PK", "not an indexed dataset"),
        (9, struct.pack("<Q", 2), "version 2; only version 1"),
        (17, b"\x09", "unknown dtype code 9"),
        (17, b"\x07", "float32 values"),
        (18, struct.pack("<Q", 2**62), "truncated: 4611686018427387904 sequences"),
        (26, struct.pack("<Q", 2**64 - 1), "truncated"),
        (26, struct.pack("<Q", 2), "bytes beyond its end"),
        (LENGTHS, struct.pack("<i", 4), "damaged|truncated"),
        (LENGTHS, struct.pack("<i", 2), "sequence 1 has 1 tokens of 2 bytes at byte 6 .* ends at byte 4"),
        (LENGTHS + 8, struct.pack("<i", 1), "lists 5 tokens of 2 bytes, 10 in all"),
        (LENGTHS, struct.pack("<i", -1), "sequence 0 has -1 tokens"),
        (OFFSETS + 8, struct.pack("<q", 12), "sequence 1 has 1 tokens of 2 bytes at byte 12"),
        (OFFSETS + 8, struct.pack("<q", 2**63 - 2), "damaged: sequence 1"),
        (OFFSETS + 8, struct.pack("<q", -2), "damaged: sequence 1"),
        (OFFSETS + 8, struct.pack("<q", 5), "damaged: sequence 1"),
        (OFFSETS, struct.pack("<3q", 6, 0, 8), "damaged: sequence 0"),
        (OFFSETS, struct.pack("<3q", 0, 4, 8), "damaged: sequence 1"),
        (OFFSETS, struct.pack("<3q", 8, 6, 0), "damaged: sequence 0"),
        (OFFSETS, bytes(24), "damaged: sequence 1"),
        (DOCUMENTS, struct.pack("<q", 1), "does not ascend from 0 to 3"),
        (DOCUMENTS + 8, struct.pack("<q", 4), "does not ascend"),
        (DOCUMENTS + 16, struct.pack("<q", 2), "does not ascend"),
    ],
)
def test_damaged_index_is_named(prefix: str, at: int, data: bytes, message: str) -> None:
    with open(f"{prefix}.idx", "r+b") as stream:
        stream.seek(at)
        stream.write(data)
    with pytest.raises(UserError, match=message) as caught:
        IndexedDataset(prefix)
    assert f"{prefix}." in str(caught.value)
    assert "\n" not in str(caught.value)


def test_one_flipped_bit_of_a_length_or_an_offset_is_refused(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_ranges, "BLOCK", 2)  # the last sequence is checked in a block of its own
    whole = Path(f"{prefix}.idx").read_bytes()
    for at in range(LENGTHS, DOCUMENTS):
        for bit in range(8):
            raw = bytearray(whole)
            raw[at] ^= 1 << bit
            Path(f"{prefix}.idx").write_bytes(bytes(raw))
            with pytest.raises(UserError, match=r"d\.idx"):
                IndexedDataset(prefix)


def test_modes(prefix: str) -> None:
    """Modes of text are accepted, those of images are not; nothing else may follow."""
    path = Path(f"{prefix}.idx")
    plain = path.read_bytes()
    path.write_bytes(plain + bytes(3))
    assert IndexedDataset(prefix)[1].tolist() == [4]
    path.write_bytes(plain + b"\0\1\0")
    with pytest.raises(UserError, match="multimodal"):
        IndexedDataset(prefix)
    path.write_bytes(plain + bytes(2))
    with pytest.raises(UserError, match="bytes beyond its end"):
        IndexedDataset(prefix)


def test_every_truncation_is_refused(prefix: str) -> None:
    whole = Path(f"{prefix}.idx").read_bytes()
    for size in range(len(whole)):
        Path(f"{prefix}.idx").write_bytes(whole[:size])
        with pytest.raises(UserError):
            IndexedDataset(prefix)
    Path(f"{prefix}.idx").write_bytes(whole)
    for size in range(12):
        Path(f"{prefix}.bin").write_bytes(EXAMPLE_BIN[:size])
        with pytest.raises(UserError):
            IndexedDataset(prefix)


@given(flips=st.lists(st.tuples(st.integers(0, 93), st.integers(1, 255)), min_size=1, max_size=4))
@settings(max_examples=300, deadline=None)
def test_flipped_bytes_never_lead_outside(flips: list[tuple[int, int]]) -> None:
    """Damage that no check can see gives other tokens of the file, of the lengths that the index says."""
    raw = bytearray(EXAMPLE_IDX)
    assert len(raw) == 94
    for at, mask in flips:
        raw[at] ^= mask
    with tempfile.TemporaryDirectory() as folder:
        prefix = f"{folder}/d"
        Path(f"{prefix}.idx").write_bytes(bytes(raw))
        Path(f"{prefix}.bin").write_bytes(EXAMPLE_BIN)
        try:
            dataset = IndexedDataset(prefix)
        except UserError:
            return
        for i in range(len(dataset)):
            assert len(dataset[i]) == dataset.sequence_lengths[i] >= 0
            assert 0 <= dataset.document_of(i) < dataset.num_documents
        assert dataset.num_tokens * dataset.dtype.itemsize == 12


WRONG = st.integers(-3, 16) | st.sampled_from([2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, -(2**63)])


def mostly(right: int | None, wrong: st.SearchStrategy[int]) -> st.SearchStrategy[int | None]:
    return st.integers(0, 11).flatmap(lambda n: wrong if n == 11 else st.just(right))


@st.composite
def hostile_files(draw: st.DrawFn) -> tuple[bytes, int]:
    """An .idx, each of its numbers right or not, perhaps cut or lengthened, and the size of its .bin."""
    lengths = draw(st.lists(st.integers(0, 4), max_size=5))
    offsets = [sum(lengths[:i]) * 2 for i in range(len(lengths))]
    documents = [0, *sorted(draw(st.lists(st.integers(0, len(lengths)), max_size=4))), len(lengths)]
    counts = [draw(mostly(len(values), WRONG)) % 2**64 for values in (lengths, documents)]
    raw = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, draw(mostly(8, st.integers(0, 255))), *counts)
    for values, size in ((lengths, 4), (offsets, 8), (documents, 8)):
        for value in values:
            raw += (draw(mostly(value, WRONG)) % 2 ** (8 * size)).to_bytes(size, "little")
    raw = raw[: draw(mostly(None, st.integers(0, len(raw))))]
    raw += bytes(draw(mostly(0, st.integers(0, 9))))
    return raw, draw(mostly(2 * sum(lengths), st.integers(0, 40)))


def open_in_little_memory(prefix: str) -> IndexedDataset | str:
    """The dataset, or the message that refuses it."""
    tracemalloc.start()
    try:
        return IndexedDataset(prefix)
    except UserError as error:
        return str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 20, "a count in the header decides of no allocation"


@given(files=hostile_files() | st.tuples(st.binary(max_size=120), st.integers(0, 40)))
@settings(max_examples=300, deadline=None)
def test_hostile_files_are_refused_by_name_or_read_within_themselves(files: tuple[bytes, int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        prefix = f"{folder}/d"
        Path(f"{prefix}.idx").write_bytes(files[0])
        Path(f"{prefix}.bin").write_bytes(bytes(range(files[1])))
        dataset = open_in_little_memory(prefix)
        if isinstance(dataset, str):
            assert prefix in dataset
            assert "\n" not in dataset
            return
        for i in range(len(dataset)):
            assert len(dataset[i]) == dataset.sequence_lengths[i] >= 0
            assert 0 <= dataset.document_of(i) < dataset.num_documents
        assert sum(dataset.sequence_lengths.tolist()) * dataset.dtype.itemsize == files[1]


def test_missing_files_are_named_with_what_was_meant(prefix: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such dataset file: .*/nothing\.bin; pass the prefix"):
        IndexedDataset(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"pass the prefix without \.bin: .*/d$"):
        IndexedDataset(f"{prefix}.bin")
    write(str(tmp_path / "web_text_document"), [[[1]]])
    with pytest.raises(UserError, match=r"did you mean .*/web_text_document\?"):
        IndexedDataset(tmp_path / "web")
    os.remove(f"{prefix}.bin")
    with pytest.raises(UserError, match=r"no such dataset file: .*d\.bin"):
        IndexedDataset(prefix)


def test_empty_dataset(tmp_path: Path) -> None:
    dataset = IndexedDataset(write(str(tmp_path / "d"), []))
    assert (len(dataset), dataset.num_documents, dataset.num_tokens) == (0, 0, 0)
