"""Corpora in S3, served by this machine: few requests of few bytes, and every fault of a store."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megalite.config import Config, DataConfig
from megalite.data import file_ranges
from megalite.data.corpus_sources import sources_of_one_blend
from megalite.data.dataset_merge import list_shards
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.preprocessing.input_plan import PreprocessJob
from megalite.data.preprocessing.preprocess import preprocess
from megalite.data.sharded_dataset import open_dataset
from megalite.data.window_dataset import WindowDataset
from megalite.train.run_context import with_shuffle_block
from megalite.utils.errors import UserError
from tests.corpora import build_datasets
from tests.object_server import ObjectServer, object_server, s3_in

pytest.importorskip("obstore")

WriteDataset = Callable[..., str]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    with s3_in(tmp_path, monkeypatch) as server:
        yield server


def upload(server: ObjectServer, folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_file():
            server.objects[f"b/{path.name}"] = path.read_bytes()


def listed(write_dataset: WriteDataset, tmp_path: Path) -> str:
    """The prefix of a corpus of two shards, each of 200 documents of 2,000 bytes."""
    shards = [write_dataset([500] * 200, f"c{i}", "int32") for i in range(2)]
    list_shards(shards, str(tmp_path / "corpus"))
    return str(tmp_path / "corpus")


def test_cold_samples_fetch_their_documents_alone(
    server: ObjectServer, write_dataset: WriteDataset, tmp_path: Path
) -> None:
    prefix = listed(write_dataset, tmp_path)
    upload(server, tmp_path)
    here, there = (
        build_datasets([path], "1,0,0", 128, (50, 0, 0), 1).train for path in (prefix, "s3://b/corpus")
    )
    assert here is not None and there is not None
    server.requests.clear()
    numbers = np.arange(50)
    assert np.array_equal(there.gather(numbers), here.gather(numbers))  # type: ignore[attr-defined]
    rows = here.index.shuffle_index[:50]  # type: ignore[attr-defined]
    positions = [here.index.sample_index[row : row + 2, 0] for row in rows]  # type: ignore[attr-defined]
    used = {i for first, last in positions for i in range(first, last + 1)}
    fetched = sum(each.end - each.begin for each in server.requests)
    assert 2000 * len(used) <= fetched < 1.3 * 2000 * len(used)
    assert {each.method for each in server.requests} == {"GET"}
    assert len(server.requests) <= len(used)


def test_windows_of_a_batch_are_fetched_together(
    server: ObjectServer, write_dataset: WriteDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = listed(write_dataset, tmp_path)
    upload(server, tmp_path)
    here, there = (
        WindowDataset(open_dataset(path), range(400), None, 128, 1) for path in (prefix, "s3://b/corpus")
    )
    calls, fetch = [], file_ranges.fetch_missing
    monkeypatch.setattr(file_ranges, "fetch_missing", lambda wanted: (calls.append(wanted), fetch(wanted)))
    numbers = np.arange(len(here))  # one of them is in both shards
    assert np.array_equal(there.gather(numbers), here.gather(numbers))
    assert [len(call) for call in calls if call] == [3], "two shards and their checksums"


@pytest.mark.parametrize("first", [0, 150])  # of the split: its blocks begin anywhere in the file
def test_a_block_of_windows_is_one_request(
    server: ObjectServer, write_dataset: WriteDataset, tmp_path: Path, first: int
) -> None:
    """Whatever the batches are, and although the last block is shorter."""
    prefix = write_dataset([500] * 200, "c", "int32")
    upload(server, tmp_path)
    here, there = (
        WindowDataset(open_dataset(path), range(first, 200), None, 128, 1, shuffle_block=16)
        for path in (prefix, "s3://b/c")
    )
    server.requests.clear()
    for numbers in np.array_split(np.arange(len(here)), 40):
        assert np.array_equal(there.gather(numbers), here.gather(numbers))
    assert len(server.requests) <= -(-len(here) // 16)
    used = 4 * 128 * len(here)
    assert used <= sum(each.end - each.begin for each in server.requests) < 1.1 * used


def test_blocks_are_the_default_of_windows_from_a_store(write_dataset: WriteDataset, tmp_path: Path) -> None:
    """Also of a shard that a list here names. A copy has another default, which a checkpoint compares."""
    here = listed(write_dataset, tmp_path)
    text = Path(f"{here}.shards.json").read_text()
    (tmp_path / "links.shards.json").write_text(text.replace('"c1"', '"s3://b/c1"'))
    windows, paths = DataConfig(sample_order="windows"), ("s3://b/c", str(tmp_path / "links"), here)
    of_paths = [{"train": sources_of_one_blend([path], "1")["train"]} for path in paths]
    blocks = [
        [with_shuffle_block(Config(data=data), sources).data.shuffle_block for sources in of_paths]
        for data in (windows, replace(windows, shuffle_block=7), DataConfig())
    ]
    assert blocks == [[64, 64, 1], [7, 7, 7], [None, None, None]]


def test_a_flipped_bit_is_fetched_again_and_then_named(
    server: ObjectServer, write_dataset: WriteDataset, tmp_path: Path
) -> None:
    here = open_dataset(listed(write_dataset, tmp_path))
    upload(server, tmp_path)
    there = open_dataset("s3://b/corpus")
    server.flips, server.flips_in = 1, ".bin"
    assert there[0].tolist() == here[0].tolist()
    server.flips = 2
    with pytest.raises(UserError, match=r"s3://b/c1\.bin, bytes 0 to 2000: the store sent other bytes"):
        there[200]
    assert there[200].tolist() == here[200].tolist(), "the damaged bytes are not in the cache"


def test_a_flipped_bit_in_a_window_is_fetched_again_and_then_named(
    server: ObjectServer, write_dataset: WriteDataset, tmp_path: Path
) -> None:
    """Wherever it is in the pieces that are fetched with a window, or in their checksums."""
    prefix = listed(write_dataset, tmp_path)
    upload(server, tmp_path)
    here, there = (
        WindowDataset(open_dataset(path, checks_index=False), range(400), None, 5000, 1)
        for path in (prefix, "s3://b/corpus")
    )
    order = here.windows(np.arange(len(here))).tolist()
    server.flips, server.flips_in = 1, "crc32"  # its first byte is of document 0
    assert np.array_equal(there.indexed[0], here.indexed[0])
    server.requests.clear()
    server.flips, server.flips_in = 1, "c0.bin"
    sample = order.index(1)  # bytes 20,000 to 40,004: pieces 1 and 2
    assert np.array_equal(there[sample], here[sample])
    fetched = [(each.begin, each.end) for each in server.requests if each.name == "b/c0.bin"]
    assert fetched == [(16384, 3 * 16384), (16384, 2 * 16384)]
    server.flips, server.flips_in = 2, "c1.bin"
    sample = order.index(21)
    with pytest.raises(UserError, match=r"s3://b/c1\.bin, bytes 16384 to 32768: the store sent other bytes"):
        there[sample]
    assert np.array_equal(there[sample], here[sample]), "the damaged bytes are not in the cache"


def test_a_list_without_checksums_of_pieces_is_read_with_a_notice(
    server: ObjectServer, write_dataset: WriteDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = listed(write_dataset, tmp_path)
    path, sums = Path(f"{prefix}.shards.json"), Path(f"{prefix}.shards.crc32")
    record, values = json.loads(path.read_text()), np.fromfile(sums, "<u4")
    per_shard = 200 + -(-400_000 // record.pop("piece_bytes"))
    old = np.concatenate([values[:200], values[per_shard : per_shard + 200]]).tobytes()
    sums.write_bytes(old)
    path.write_text(json.dumps(record | {"format": 1, "checksums_crc32": zlib.crc32(old)}))
    upload(server, tmp_path)
    corpus = open_dataset("s3://b/corpus")
    assert (corpus.has_checksums(of_windows=True), corpus.has_checksums(of_windows=False)) == (False, True)
    assert np.array_equal(
        corpus.read_tokens(99_990, 100_010), open_dataset(prefix).read_tokens(99_990, 100_010)
    )
    build_datasets(["s3://b/corpus"], "1,0,0", 128, (50, 0, 0), 1)
    assert "has no checksums" not in caplog.text
    build_datasets(["s3://b/c0"], "1,0,0", 128, (50, 0, 0), 1)
    assert "s3://b/c0: what is read from object storage has no checksums" in caplog.text


def test_a_store_that_is_busy_or_breaks_off_is_asked_again(
    server: ObjectServer, write_dataset: WriteDataset, tmp_path: Path
) -> None:
    here = IndexedDataset(write_dataset([1000] * 9, "c"))
    upload(server, tmp_path)
    there = IndexedDataset("s3://b/c")
    server.refusals = 2
    assert there[0].tolist() == here[0].tolist()
    server.cuts = 1
    assert there[4].tolist() == here[4].tolist()
    server.delay = 0.3
    assert there[8].tolist() == here[8].tolist()


@pytest.mark.parametrize("named", ["in/**/*.gz in/a.jsonl", "in/", "in/a.jsonl in/sub/b.jsonl.gz"])
def test_preprocessing_reads_objects(server: ObjectServer, tmp_path: Path, named: str) -> None:
    """The output is that of the same files on this machine: one that is read in parts, and a .gz."""
    lines = [json.dumps({"text": f"document {i} " * 50}).encode() + b"\n" for i in range(12_000)]
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "a.jsonl").write_bytes(b"".join(lines))
    (tmp_path / "in" / "sub" / "b.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[:100])))
    for path in (tmp_path / "in").rglob("*.*"):
        server.objects[f"b/{path.relative_to(tmp_path)}"] = path.read_bytes()
    for where, prefix in ((f"{tmp_path}/", "here"), ("s3://b/", "there")):
        preprocess(
            PreprocessJob(tuple(f"{where}{name}" for name in named.split()), f"{tmp_path}/{prefix}", "byte")
        )
    for ending in ("bin", "idx"):
        here, there = (tmp_path / f"{name}_text_document.{ending}" for name in ("here", "there"))
        assert here.read_bytes() == there.read_bytes()
    with pytest.raises(UserError, match=r"--input s3://b/none\.jsonl names no file"):
        preprocess(PreprocessJob(("s3://b/none.jsonl",), f"{tmp_path}/out", "byte"))


def test_windows_fetch_no_index(server: ObjectServer, write_dataset: WriteDataset, tmp_path: Path) -> None:
    """But for the sizes, and where the split begins and ends."""
    list_shards([write_dataset([3] * 20_000, f"c{i}") for i in range(2)], str(tmp_path / "corpus"))
    upload(server, tmp_path)
    there = open_dataset("s3://b/corpus", checks_index=False)
    split = WindowDataset(there, range(10_000, 30_000), None, 100, 1)
    assert len(split) == (3 * 20_000 - 1) // 100
    of_index = [each for each in server.requests if each.name.endswith(".idx") and each.method == "GET"]
    assert sum(each.end - each.begin for each in of_index) < 10_000
    assert there[30_001].tolist() == open_dataset(tmp_path / "corpus")[30_001].tolist()


def test_stores_with_equal_urls_do_not_share_blocks(
    server: ObjectServer, write_dataset: WriteDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the stores give their objects the same version."""
    monkeypatch.setattr("tests.object_server._tag", lambda _: '"1"')
    write_dataset([500], "c")
    upload(server, tmp_path)
    assert IndexedDataset("s3://b/c")[0][0] == 0
    (tmp_path / "c.bin").write_bytes((tmp_path / "c.bin").read_bytes()[::-1])
    with object_server() as other:
        upload(other, tmp_path)
        monkeypatch.setenv("AWS_ENDPOINT_URL", other.url)
        assert IndexedDataset("s3://b/c")[0][0] == 499 << 8 & 0xFFFF | 499 >> 8


def test_another_version_is_never_mixed_in(
    server: ObjectServer, write_dataset: WriteDataset, tmp_path: Path
) -> None:
    write_dataset([1000] * 9, "c")
    upload(server, tmp_path)
    there = IndexedDataset("s3://b/c")
    assert there[0][0] == 0
    server.objects["b/c.bin"] = server.objects["b/c.bin"][::-1]
    with pytest.raises(UserError, match=r"s3://b/c\.bin was changed or removed while it was in use"):
        there[8]
    with pytest.raises(UserError, match=r"no such dataset file: s3://b/none\.bin"):
        open_dataset("s3://b/none")
