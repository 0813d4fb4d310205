"""Corpora in object storage: the same tokens as on disk, from the blocks that are needed, fetched once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from megalite.cli.datasets import compare, find_problem, summarize
from megalite.data import storage
from megalite.data.dataset_merge import list_shards, merge_datasets
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.preprocessing.documents import find_inputs
from megalite.data.sharded_dataset import open_dataset
from megalite.data.tokenizers.tokenizer import ByteTokenizer, write_tokenizer_digest
from megalite.data.tokenizers.train_tokenizer import TrainedTokenizer, write_tokenizer
from megalite.utils.errors import UserError
from tests.corpora import build_datasets

WriteDataset = Callable[..., str]
LENGTHS = [5, 0, 3, 40, 2, 9, 1]


class Requests(list[tuple[str, int, int]]):
    """The requests to the store: the object's name, and the first and last byte."""


@pytest.fixture(autouse=True)
def requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Requests]:
    """Small blocks, a cache of the test's own, an empty memory store, and a record of its use."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(storage, "GRANULE_BYTES", 16)
    made, cat_file = Requests(), MemoryFileSystem.cat_file

    def recorded(self: Any, path: str, start: int, end: int) -> bytes:
        made.append((path.rsplit("/", 1)[-1], start, end))
        return bytes(cat_file(self, path, start=start, end=end))

    monkeypatch.setattr(MemoryFileSystem, "cat_file", recorded)
    yield made
    MemoryFileSystem.store.clear()


def upload(prefix: str, name: str = "corpus") -> str:
    for ending in (".bin", ".idx"):
        MemoryFileSystem().pipe_file(f"/bucket/{name}{ending}", Path(f"{prefix}{ending}").read_bytes())
    return f"memory://bucket/{name}"


@pytest.mark.parametrize("scheme", ["memory", "local", "file"])
def test_tokens_are_those_on_disk(write_dataset: WriteDataset, scheme: str) -> None:
    prefix = write_dataset(LENGTHS)
    there = IndexedDataset(upload(prefix) if scheme == "memory" else f"{scheme}://{prefix}")
    here = IndexedDataset(prefix)
    assert there.is_remote == (scheme != "file")
    for i in np.random.default_rng(0).permutation(len(here)).tolist():
        assert there[i].tolist() == here[i].tolist()
    assert there.tokens.tolist() == here.tokens.tolist()
    assert compare(IndexedDataset(there.prefix), here) is None


def test_a_block_is_fetched_when_needed_and_once(write_dataset: WriteDataset, requests: Requests) -> None:
    url = upload(write_dataset(LENGTHS))  # 60 tokens of 2 bytes, 8 a block
    dataset = IndexedDataset(url)
    requests.clear()
    assert dataset[2].tolist() == [5, 6, 7]
    assert requests == [("corpus.bin", 0, 16)]
    assert dataset[0].tolist() == [0, 1, 2, 3, 4]
    assert dataset[1].tolist() == []
    assert len(requests) == 1
    assert dataset[4].tolist() == [48, 49]  # bytes 96 to 100
    assert requests[1:] == [("corpus.bin", 96, 112)]
    assert len(dataset[3]) == 40  # bytes 16 to 96, one request
    assert requests[2:] == [("corpus.bin", 16, 96)]
    assert dataset[6].tolist() == [59]  # the last block is short
    assert requests[3:] == [("corpus.bin", 112, 120)]
    again = IndexedDataset(url)
    assert again.tokens.tolist() == list(range(60))
    assert len(requests) == 4, "what is on this machine is not fetched by another reader"


def test_requests_are_of_bounded_size(
    write_dataset: WriteDataset, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "MAX_REQUEST_BYTES", 48)
    dataset = IndexedDataset(upload(write_dataset(LENGTHS)))
    requests.clear()
    dataset.tokens.sum()
    assert sorted((begin, end) for _, begin, end in requests) == [(0, 48), (48, 96), (96, 120)]


def test_a_changed_object_is_read_anew(write_dataset: WriteDataset) -> None:
    url = upload(write_dataset([4]))
    assert IndexedDataset(url)[0].tolist() == [0, 1, 2, 3]
    assert upload(write_dataset([4], "newer", first=7)) == url
    assert IndexedDataset(url)[0].tolist() == [7, 8, 9, 10]


@pytest.mark.parametrize("kind", ["changed", "removed"])
def test_an_object_changed_while_it_is_read_is_named(write_dataset: WriteDataset, kind: str) -> None:
    """The blocks of two versions are never mixed, not even for the next reader of the old version."""
    url = upload(write_dataset(LENGTHS))
    dataset = IndexedDataset(url)
    dataset[0]
    old = MemoryFileSystem.store["/bucket/corpus.bin"]
    upload(write_dataset(LENGTHS, "newer", first=7))
    if kind == "removed":
        del MemoryFileSystem.store["/bucket/corpus.bin"]
    with pytest.raises(UserError, match=rf"{url}\.bin was changed or removed while it was in use"):
        dataset[4]
    assert dataset[0].tolist() == [0, 1, 2, 3, 4], "what was read before"
    MemoryFileSystem.store["/bucket/corpus.bin"] = old
    assert dataset[4].tolist() == [48, 49]


def test_training_inspecting_and_merging_take_urls(write_dataset: WriteDataset, tmp_path: Path) -> None:
    prefix = write_dataset(LENGTHS)
    url = upload(prefix)
    here, there = (
        build_datasets([path], "1,0,0", 4, (20, 0, 0), seed=3, vocab_size=60).train for path in (prefix, url)
    )
    assert here is not None and there is not None
    for i in range(20):
        assert there[i].tolist() == here[i].tolist()
    dataset = IndexedDataset(url)
    assert find_problem(dataset, summarize(dataset), 60) is None
    merge_datasets([url, prefix], str(tmp_path / "merged"))
    assert IndexedDataset(str(tmp_path / "merged")).tokens.tolist() == 2 * list(range(60))


def test_bytes_that_were_not_listed_are_fetched_again_and_then_named(
    write_dataset: WriteDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write_dataset([40] * 10)
    list_shards([prefix], str(tmp_path / "list"))
    url = upload(prefix)
    for ending in (".shards.json", ".shards.crc32"):
        MemoryFileSystem().pipe_file(
            f"/bucket/list{ending}", Path(f"{tmp_path / 'list'}{ending}").read_bytes()
        )
    dataset, cat_file, flips = (
        open_dataset("memory://bucket/list"),
        MemoryFileSystem.cat_file,
        [1, 1, 0, 1, 0],
    )

    def flipped(self: Any, path: str, start: int, end: int) -> bytes:
        data = bytes(cat_file(self, path, start=start, end=end))
        return bytes([data[0] ^ flips.pop()]) + data[1:] if path.endswith(".bin") else data

    monkeypatch.setattr(MemoryFileSystem, "cat_file", flipped)
    assert dataset[0].tolist() == list(range(40))
    assert dataset[9].tolist() == list(range(360, 400))
    assert flips == [1, 1]
    flips[:] = [0, 1, 1]
    with pytest.raises(UserError, match=rf"{url}\.bin, bytes 320 to 400: the store sent other bytes"):
        dataset[4]
    assert dataset[4].tolist() == list(range(160, 200))


def test_the_cache_is_bounded_while_it_is_read(
    write_dataset: WriteDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By several ranks from several shards at the same time.

    Regions of a file in use are removed, and fetched again when they are read again.
    """
    monkeypatch.setattr(storage, "GRANULE_BYTES", 4096)
    monkeypatch.setattr(storage, "_REGION_BYTES", 1 << 16)
    limit, here, kept, write = 1 << 20, np.arange(400_000), list[int](), storage._write
    urls = [upload(write_dataset([10_000] * 40, f"c{i}", dtype="int32"), f"c{i}") for i in range(5)]  # 8 MB

    def write_and_measure(path: Path, parts: Sequence[tuple[int, bytes]]) -> None:
        write(path, parts)
        kept.append(sum(each.stat().st_blocks * 512 for each in path.parent.glob("*.bytes")))

    monkeypatch.setattr(storage, "_write", write_and_measure)

    def read(rank: int) -> None:
        shards = [IndexedDataset(url, limit) for url in urls]
        for number in np.random.default_rng(rank).permutation(400).tolist():
            i = number % 40
            assert np.array_equal(shards[number % 5][i], here[10_000 * i : 10_000 * (i + 1)])

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(read, range(3)))
    assert 0.8 * limit < max(kept) <= 1.02 * limit, "but for the file system's own blocks"


def test_an_index_above_the_limit_leaves_most_of_what_was_just_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must stay, so removing regions makes no space: then no more of them go than come."""
    monkeypatch.setattr(storage, "_REGION_BYTES", size := 1 << 16)
    index, *shards = files = ("c.idx", "c0.bin", "c1.bin")
    opened = {}
    for name in files:
        MemoryFileSystem().pipe_file(f"/bucket/{name}", os.urandom(8 * size))
        opened[name] = storage.CachedBytes(f"memory://bucket/{name}", tmp_path / "blocks", limit=4 * size)
    storage.fetch_missing({opened[index]: [(0, 8 * size)]})
    first, second = (opened[name] for name in shards)
    storage.fetch_missing({first: [(0, 8 * size)], second: [(0, size)]})
    assert sum(first.copy(i * size, (i + 1) * size) is not None for i in range(8)) == 7
    assert opened[index].copy(0, 8 * size) is not None


def test_a_copy_that_lost_its_bytes_meanwhile_is_not_used(write_dataset: WriteDataset) -> None:
    dataset = IndexedDataset(upload(write_dataset([40])))
    file = dataset.files[0]
    assert isinstance(file, storage.CachedBytes)
    assert file.copy(0, 80) is None, "nothing was fetched"
    file.fetch(0, 80)
    assert file.copy(0, 80) is not None
    file.forget(32, 48)
    assert file.copy(0, 80) is None and file.copy(0, 32) is not None


READER = """
import sys, tempfile
from megalite.data import storage
from megalite.data.indexed_dataset import IndexedDataset
storage.GRANULE_BYTES = 16
tempfile.tempdir = sys.argv[2]
dataset = IndexedDataset(sys.argv[1])
assert [dataset[i].tolist() for i in range(200)] == [list(range(4 * i, 4 * i + 4)) for i in range(200)]
"""


def test_processes_share_the_cache_at_the_same_time(write_dataset: WriteDataset, tmp_path: Path) -> None:
    url = f"local://{write_dataset([4] * 200)}"
    command = [sys.executable, "-c", READER, url, str(tmp_path / "tmp")]
    readers = [subprocess.Popen(command) for _ in range(3)]
    assert [reader.wait(600) for reader in readers] == [0, 0, 0]
    folder = next((tmp_path / "tmp").iterdir())
    assert len(list(folder.glob("*.bytes"))) == len(list(folder.glob("*.marks"))) == 2


def test_bytes_are_on_disk_before_they_are_marked(
    write_dataset: WriteDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever happens while a block is written, the next reader fetches it again."""
    url = upload(write_dataset([20]))
    dataset = IndexedDataset(url)

    def die(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(storage.os, "fsync", die)
        with pytest.raises(UserError, match=r"cannot cache memory://bucket/corpus\.bin in .*No space left"):
            dataset[0]
    assert IndexedDataset(url)[0].tolist() == list(range(20))


def test_mistakes_are_named(write_dataset: WriteDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    url = upload(write_dataset([20]))
    with pytest.raises(UserError, match=r"no such dataset file: memory://bucket/none\.bin"):
        IndexedDataset("memory://bucket/none")
    with pytest.raises(UserError, match=r"cannot read nowhere://bucket/corpus\.bin: Protocol not known"):
        IndexedDataset("nowhere://bucket/corpus")
    MemoryFileSystem().pipe_file("/bucket/corpus.bin", bytes(38))
    with pytest.raises(UserError, match=r"corpus\.bin has 38 bytes, but memory://bucket/corpus\.idx"):
        IndexedDataset(url)
    dataset = IndexedDataset(upload(write_dataset([20], "again"), "again"))
    monkeypatch.setattr(MemoryFileSystem, "cat_file", lambda *_, **__: b"short")
    with pytest.raises(UserError, match=r"sent 5 bytes, not 40"):
        dataset[0]

    def refuse(*_: object, **__: object) -> bytes:
        raise RuntimeError("503 Slow Down\nrequest id")

    monkeypatch.setattr(MemoryFileSystem, "cat_file", refuse)
    with pytest.raises(UserError, match=r"cannot read memory://bucket/again\.bin: 503 Slow Down$"):
        dataset[0]
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(UserError, match="pip install fsspec"):
        IndexedDataset("memory://bucket/corpus")


def test_the_cache_is_the_users_own(
    write_dataset: WriteDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = upload(write_dataset([4]))
    another = os.getuid() + 1
    (tmp_path / "tmp" / f"megalite-blocks-{another}").mkdir()
    monkeypatch.setattr(storage.os, "getuid", lambda: another)
    with pytest.raises(UserError, match="belongs to another user"):
        IndexedDataset(url)


def test_no_other_user_can_choose_where_blocks_go(write_dataset: WriteDataset, tmp_path: Path) -> None:
    url = upload(write_dataset([4]))
    IndexedDataset(url)
    (folder,) = (tmp_path / "tmp").iterdir()
    folder.chmod(0o770)
    with pytest.raises(UserError, match="other users may write to the folder; set TMPDIR"):
        IndexedDataset(url)
    folder.chmod(0o700)
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    assert IndexedDataset(url)[0].tolist() == [0, 1, 2, 3], "a link of the user's own"
    if os.getuid() == 0:
        os.lchown(folder, 1, 1)
        with pytest.raises(UserError, match="belongs to another user"):
            IndexedDataset(url)


def test_a_copy_cut_while_it_is_read_is_named(write_dataset: WriteDataset, tmp_path: Path) -> None:
    dataset = IndexedDataset(upload(write_dataset([4000])))
    assert len(dataset[0]) == 4000
    for copy in (tmp_path / "tmp").glob("*/*.bytes"):
        os.truncate(copy, 100)
    with pytest.raises(UserError, match=r"memory://bucket/corpus\.bin \(its copy .*bytes\) became shorter"):
        dataset[0]
    again = IndexedDataset(dataset.prefix)
    assert again[0].tolist() == list(range(4000)), "what was cut off is fetched again"


def test_folders_and_globs_of_a_store_are_inputs(tmp_path: Path) -> None:
    for name in ("a.jsonl", "sub/b.jsonl.gz", "c.bin"):
        MemoryFileSystem().pipe_file(f"/texts/{name}", b"{}")
    found = ["memory:///texts/a.jsonl", "memory:///texts/sub/b.jsonl.gz"]
    assert find_inputs(["memory://texts"]) == find_inputs(["memory://texts/**/*.jsonl*"]) == found
    assert find_inputs([found[0]]) == found[:1]
    with pytest.raises(UserError, match=r"--input memory://none names no file: pass files"):
        find_inputs(["memory://none"])


def test_no_temporary_file_is_written_through_a_link(write_dataset: WriteDataset, tmp_path: Path) -> None:
    """Whoever may write to the folder knows the names."""
    prefix, precious = write_dataset([4]), tmp_path / "precious"
    precious.write_text("precious")
    names = [f"out.bin.{os.getpid()}.tmp", f"out.idx.{os.getpid()}.tmp", f"out.{os.getpid()}.tmp"]
    names.append(f"out.tokenizer.json.{os.getpid()}.part")

    def in_spite_of_links(write: Callable[[], object]) -> None:
        for name in names:
            (tmp_path / name).symlink_to(precious)
        write()
        assert precious.read_text() == "precious"
        for name in names:
            (tmp_path / name).unlink(missing_ok=True)

    in_spite_of_links(lambda: write_dataset([4], "out"))
    in_spite_of_links(lambda: merge_datasets([prefix, prefix], str(tmp_path / "out"), overwrite=True))
    assert IndexedDataset(str(tmp_path / "out"))[1].tolist() == [0, 1, 2, 3]
    in_spite_of_links(lambda: write_tokenizer_digest(str(tmp_path / "out"), ByteTokenizer()))
    trained = TrainedTokenizer(b"tokenizer", 1)
    in_spite_of_links(lambda: write_tokenizer(tmp_path / "out", lambda: trained))
    assert (tmp_path / "out").read_bytes() == b"tokenizer"


def test_room_is_made_among_what_no_process_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "blocks"

    def opened(name: str) -> storage.CachedBytes:
        file = storage.CachedBytes(f"memory://bucket/{name}", folder)
        file.fetch(0, 5000)
        assert file.array.tolist() == list(contents[name])
        return file

    contents = {name: os.urandom(5000) for name in ("old", "older", "held", "new")}
    for name, content in contents.items():
        MemoryFileSystem().pipe_file(f"/bucket/{name}", content)
    for age, name in enumerate(("old", "older")):
        before = set(folder.glob("*"))
        opened(name)
        for path in set(folder.glob("*")) - before:
            os.utime(path, (10 - age, 10 - age))
    held = opened("held")
    assert len(list(folder.glob("*.bytes"))) == 3  # there is room enough
    num_bytes = max(path.stat().st_blocks * 512 for path in folder.glob("*.bytes"))
    usage, available = shutil.disk_usage(folder), [6 * num_bytes]

    def disk_usage(_: Path) -> Any:
        kept = sum(path.stat().st_blocks * 512 for path in folder.glob("*.bytes"))
        return usage._replace(free=max(0, available[0] - kept))

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    new = opened("new")  # three of the four that there was room for are kept, and one goes
    assert {path.stat().st_mtime for path in folder.glob("*.marks")} >= {10}
    assert len(list(folder.glob("*.marks"))) == len(list(folder.glob("*.bytes"))) == 3
    available[0] = 0
    opened("new")  # only what is open is left, though it is over half
    assert len(list(folder.glob("*.bytes"))) == 2
    for file, name in ((held, "held"), (new, "new")):
        assert file.array.tolist() == list(contents[name])
