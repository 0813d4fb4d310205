"""A corpus in shards: the samples of the merged files for any number of shards, and no shard exchanged."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megalite.cli import datasets
from megalite.cli.datasets import compare, summarize
from megalite.data import sharded_dataset
from megalite.data.corpus_record import CorpusIdentity
from megalite.data.dataset_merge import list_shards, merge_datasets
from megalite.data.indexed_dataset import IndexedDataset, IndexedWriter
from megalite.data.loss_mask import LossMask
from megalite.data.sharded_dataset import JoinedArray, ShardedDataset, corpus_lengths, open_dataset
from megalite.data.tokenizers.tokenizer import (
    ByteTokenizer,
    NullTokenizer,
    read_tokenizer_digest,
    write_tokenizer_digest,
)
from megalite.data.window_dataset import WindowDataset
from megalite.utils.errors import UserError
from tests.chat import write_masked
from tests.corpora import build_datasets


def documents(number: int, seed: int = 0) -> list[list[list[int]]]:
    """Documents of zero to three sequences, some of them empty."""
    random = np.random.default_rng(seed)
    return [
        [random.integers(0, 1000, random.integers(0, 40)).tolist() for _ in range(random.integers(0, 4))]
        for _ in range(number)
    ]


def write(prefix: Path, content: list[list[list[int]]], dtype: str = "uint16") -> str:
    with IndexedWriter(str(prefix), dtype, overwrite=True) as writer:
        for sequences in content:
            writer.add_document(sequences)
    return str(prefix)


def shards_of(folder: Path, content: list[list[list[int]]], count: int) -> list[str]:
    folder.mkdir()
    bounds = np.linspace(0, len(content), count + 1, dtype=int)
    return [
        write(folder / f"c-{i:05}-of-{count:05}_text_document", content[bounds[i] : bounds[i + 1]])
        for i in range(count)
    ]


@pytest.fixture
def listed(tmp_path: Path) -> Callable[[int], str]:
    """Returns the prefix of the same corpus, in some number of shards."""

    def make(count: int) -> str:
        prefix = str(tmp_path / f"in{count}" / "corpus")
        list_shards(shards_of(tmp_path / f"in{count}", documents(100), count), prefix)
        return prefix

    return make


@pytest.mark.parametrize("count", [1, 3, 100])
def test_the_number_of_shards_changes_nothing(
    tmp_path: Path, listed: Callable[[int], str], count: int
) -> None:
    """Not the samples of a corpus or of a blend, over several epochs, nor the record in a checkpoint."""
    prefix, whole = listed(count), write(tmp_path / "whole", documents(100))
    other = write(tmp_path / "other", documents(50, seed=1))
    for mine, merged in (([prefix], [whole]), (["0.3", prefix, "0.7", other], ["0.3", whole, "0.7", other])):
        here, there = (build_datasets(path, "90,10,0", 64, (300, 20, 0), 7, 1000) for path in (mine, merged))
        for split in ("train", "valid"):
            ours, theirs = getattr(here, split), getattr(there, split)
            assert len(ours) == len(theirs)
            numbers = np.arange(len(ours))
            assert (ours.gather(numbers) == theirs.gather(numbers)).all()
    ours, theirs = open_dataset(prefix, checks_index=False), open_dataset(whole)
    windows = [WindowDataset(each, range(9, len(each) - 9), 300, 64, 7, 1000) for each in (ours, theirs)]
    assert (windows[0].gather(np.arange(300)) == windows[1].gather(np.arange(300))).all()
    assert CorpusIdentity.of(ours) == CorpusIdentity.of(theirs)
    ours = open_dataset(prefix)
    assert isinstance(ours, ShardedDataset) == (count > 0)
    assert CorpusIdentity.of(ours) == CorpusIdentity.of(theirs)
    assert compare(ours, theirs) is None
    assert str(summarize(ours)) == str(summarize(theirs))
    assert [ours.document_of(i) for i in range(len(ours))] == [
        theirs.document_of(i) for i in range(len(ours))
    ]
    assert np.array_equal(np.asarray(corpus_lengths(prefix)), np.asarray(theirs.sequence_lengths))
    merge_datasets([f"{prefix}.shards.json"], str(tmp_path / "merged"))
    for ending in (".bin", ".idx"):
        assert Path(f"{whole}{ending}").read_bytes() == (tmp_path / f"merged{ending}").read_bytes()


def test_checksums_are_those_of_sequences_and_of_16_kib_of_each_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where pieces and sequences are read in several blocks."""
    monkeypatch.setattr(sharded_dataset, "_CHECKED_BYTES", 10_000)
    content = documents(2000)
    shards = shards_of(tmp_path / "in", content, 2)
    list_shards(shards, str(tmp_path / "corpus"))
    parts = []
    for shard, half in zip(shards, (content[:1000], content[1000:]), strict=True):
        parts += [np.array(tokens, "<u2").tobytes() for document in half for tokens in document]
        data = Path(f"{shard}.bin").read_bytes()
        assert len(data) > 3 * 16384
        parts += [data[i : i + 16384] for i in range(0, len(data), 16384)]
    assert np.fromfile(tmp_path / "corpus.shards.crc32", "<u4").tolist() == [
        zlib.crc32(part) for part in parts
    ]


def test_entries_of_several_parts_are_those_of_one_array() -> None:
    parts = [np.arange(n, dtype=np.int64) for n in (3, 0, 1, 5)]
    shifts = [0, 9, 10, 20]
    whole = np.concatenate([part + shift for part, shift in zip(parts, shifts, strict=True)])
    joined = JoinedArray(parts, shifts)
    assert np.array_equal(np.asarray(joined), whole)
    for first in range(10):
        for stop in range(10):
            assert np.array_equal(joined[first:stop], whole[first:stop])
    assert [int(joined[i]) for i in range(9)] == whole.tolist()
    with pytest.raises(IndexError):
        joined[9]


def test_shards_move_with_their_list(tmp_path: Path, listed: Callable[[int], str]) -> None:
    prefix = listed(3)
    shutil.move(tmp_path / "in3", tmp_path / "moved")
    assert len(open_dataset(tmp_path / "moved" / "corpus")) == len(open_dataset(listed(1)))
    with pytest.raises(UserError, match=r"corpus\.bin; pass the prefix"):
        open_dataset(prefix)
    with pytest.raises(UserError, match=r"no such list of shards: .*corpus\.shards\.json; write it with"):
        open_dataset(f"{prefix}.shards.json")


def test_answers_of_shards_are_those_of_their_conversations(tmp_path: Path) -> None:
    parts = [write_masked(str(tmp_path / name), lengths) for name, lengths in (("a", [5, 3]), ("b", [4]))]
    list_shards(parts, str(tmp_path / "both"))
    merge_datasets(parts, str(tmp_path / "merged"))
    ours, theirs = (LossMask(open_dataset(tmp_path / name)) for name in ("both", "merged"))
    assert [ours[i].tolist() for i in range(3)] == [theirs[i].tolist() for i in range(3)]


def test_another_shard_is_named(tmp_path: Path, listed: Callable[[int], str]) -> None:
    prefix = listed(3)
    shard = tmp_path / "in3" / "c-00001-of-00003_text_document"
    original = {ending: Path(f"{shard}{ending}").read_bytes() for ending in (".bin", ".idx")}

    def refused(match: str) -> None:
        with pytest.raises(UserError, match=match) as error:
            open_dataset(prefix)
        assert "\n" not in str(error.value)
        for ending, data in original.items():
            Path(f"{shard}{ending}").write_bytes(data)

    os.truncate(f"{shard}.bin", 100)
    refused(r"c-00001-of-00003_text_document\.bin has 100 bytes, but")
    os.remove(f"{shard}.bin")
    refused(r"no such dataset file: .*c-00001-of-00003_text_document\.bin")
    write(shard, documents(20, seed=5))
    refused(r"c-00001-of-00003_text_document has 20 documents and \d+ tokens \(uint16\), and .*json lists")
    content = documents(100)[33:66]
    swap = next(i for i in range(32) if content[i] != content[i + 1])
    content[swap : swap + 2] = content[swap + 1], content[swap]
    write(shard, content)
    refused(r"c-00001-of-00003_text_document\.idx is not the file that .*corpus\.shards\.json lists")
    data = bytearray(original[".bin"])
    data[40] ^= 1
    Path(f"{shard}.bin").write_bytes(data)
    with pytest.raises(
        UserError, match=r"c-00001-of-00003_text_document\.bin is not the file .* document 3\d of"
    ):
        datasets.inspect_dataset([prefix])


def test_windows_check_a_shard_when_its_index_is_read(tmp_path: Path, listed: Callable[[int], str]) -> None:
    """But the sizes of its files at the start: the list has them."""
    prefix = listed(3)
    path = tmp_path / "in3" / "c-00001-of-00003_text_document.idx"
    original, numbers = path.read_bytes(), np.arange(9)
    whole = open_dataset(prefix)
    expected = WindowDataset(whole, range(len(whole)), None, 64, 7).gather(numbers)
    path.write_bytes(original[:17] + b"\x03" + original[18:])  # int16
    corpus = open_dataset(prefix, checks_index=False)
    windows = WindowDataset(corpus, range(len(corpus)), None, 64, 7)
    assert np.array_equal(windows.gather(numbers), expected)
    for _ in range(2):
        with pytest.raises(UserError, match=r"c-00001.* \(int16\), and .*corpus\.shards\.json lists"):
            corpus.first_token(len(corpus.shards[0]))
    for file, match in (
        (path, r"c-00001-of-00003_text_document\.idx is truncated"),
        (
            path.with_suffix(".bin"),
            r"document\.bin has \d+ bytes, and .*corpus\.shards\.json lists \d+ tokens",
        ),
    ):
        os.truncate(file, file.stat().st_size - 1)
        with pytest.raises(UserError, match=match):
            open_dataset(prefix, checks_index=False)
        path.write_bytes(original)


def test_shards_that_do_not_belong_together_are_not_listed(tmp_path: Path) -> None:
    parts = shards_of(tmp_path / "in", documents(9), 3)
    out = str(tmp_path / "in" / "corpus")
    with pytest.raises(UserError, match=r"c-\*-of-00003_text_document has 3 parts, .* lack 1 .*00001"):
        list_shards([parts[0], parts[2]], out)
    wide = write(tmp_path / "in" / "wide", documents(9), "int32")
    with pytest.raises(UserError, match=r"holds uint16 tokens and .*wide int32"):
        list_shards([*parts, wide], out)
    for part, tokenizer in zip(parts, (ByteTokenizer(), ByteTokenizer(), NullTokenizer(300)), strict=True):
        write_tokenizer_digest(part, tokenizer)
    with pytest.raises(UserError, match=r"c-00000.* and .*c-00002.* were made with different tokenizers"):
        list_shards(parts, out)
    write_tokenizer_digest(parts[2], ByteTokenizer())
    list_shards(parts, out)
    assert read_tokenizer_digest(out) == read_tokenizer_digest(parts[0]) is not None
    with pytest.raises(UserError, match=r"corpus\.shards\.json exists: .*--overwrite"):
        list_shards(parts, out)
    with pytest.raises(UserError, match=r"wide\.idx exists, and it would hide the list"):
        list_shards(parts, wide, overwrite=True)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"format": 3}, "has format 3; only formats up to 2 can be read"),
        ({"piece_bytes": 0}, "its pieces have no bytes"),
        ({"dtype": "text"}, "write it again with merge-datasets --list"),
        ({"shards": []}, "lists no shards"),
        ({"checksums_crc32": 1}, r"corpus\.shards\.crc32 does not belong to .*corpus\.shards\.json"),
    ],
)
def test_a_damaged_list_is_refused(
    listed: Callable[[int], str], change: dict[str, object], match: str
) -> None:
    prefix = listed(3)
    path = Path(f"{prefix}.shards.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=match):
        open_dataset(prefix)


def test_an_index_is_not_copied(listed: Callable[[int], str]) -> None:
    """Each array of each shard is a view of the mapped file."""
    dataset = open_dataset(listed(3))
    for shard in dataset.shards:
        assert isinstance(shard, IndexedDataset)
        for array in (shard.sequence_lengths, shard.sequence_offsets, shard.document_index):
            assert not np.asarray(array).flags.owndata
