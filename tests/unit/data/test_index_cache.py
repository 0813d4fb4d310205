"""The cache of indices: one build whoever asks, no stale hit, nothing half-written, no lock of the dead."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.data import index_cache
from megalite.data.blend import BlendedDataset
from megalite.data.gpt import GPTDataset
from megalite.data.index_cache import Arrays, CacheKey, IndexCache
from megalite.data.indexed import IndexedDataset
from megalite.errors import UserError

KEY = CacheKey("GPTDataset", "train", {"seed": 1}, 3, "corpus")
FORKED = multiprocessing.get_context("fork")


def three() -> Arrays:
    return {"numbers": np.arange(3)}


def refuse() -> Arrays:
    raise AssertionError("built again")


def get(folder: Path, build: Any = three, key: CacheKey = KEY) -> list[int]:
    result: list[int] = IndexCache(folder).get(key, ["numbers"], build)["numbers"].tolist()
    return result


def test_second_time_maps_what_the_first_built(tmp_path: Path) -> None:
    assert get(tmp_path / "new" / "folder") == [0, 1, 2]
    assert get(tmp_path / "new" / "folder", refuse) == [0, 1, 2]
    array = IndexCache(tmp_path / "new" / "folder").get(KEY, ["numbers"], refuse)["numbers"]
    assert isinstance(array.base, np.memmap) and not array.flags.writeable
    names = sorted(path.name for path in (tmp_path / "new" / "folder").iterdir())
    assert names == [f"{KEY.name}-description.txt", f"{KEY.name}-numbers.npy"]


def test_default_folder_is_beside_large_corpora_alone(tmp_path: Path) -> None:
    key = KEY._replace(prefix=f"file://{tmp_path}/corpus")
    IndexCache().get(key, ["numbers"], three)
    large = key._replace(num_entries=index_cache.MIN_ENTRIES)
    IndexCache().get(large._replace(prefix="s3://bucket/corpus"), ["numbers"], three)
    assert not list(tmp_path.iterdir())
    IndexCache().get(large, ["numbers"], three)
    assert len(list((tmp_path / "corpus/cache/GPTDataset_indices").glob("*.npy"))) == 1


@pytest.mark.parametrize(
    "change", ["seed", "seq_length", "num_samples", "sequences", "lengths", "split"], ids=lambda x: x
)
def test_all_that_matters_is_in_the_digest(tmp_path: Path, write_dataset: Any, change: str) -> None:
    prefix = write_dataset([9, 8, 7, 6, 5])

    def dataset(cache: IndexCache | None, **changed: Any) -> GPTDataset:
        source = IndexedDataset(prefix)
        asked: dict[str, Any] = {
            "sequences": range(5),
            "num_samples": 20,
            "seq_length": 4,
            "seed": 3,
            **changed,
        }
        return GPTDataset(source, cache=cache, **asked)

    cache = IndexCache(tmp_path / "cache")
    dataset(cache)
    changed: dict[str, Any] = {
        "seed": {"seed": 4},
        "seq_length": {"seq_length": 3},
        "num_samples": {"num_samples": 40},
        "sequences": {"sequences": range(1, 5)},
        "split": {"split_name": "valid"},
        "lengths": {},
    }[change]
    if change == "lengths":  # the same file name, size and number of tokens
        Path(f"{prefix}.bin").unlink()
        Path(f"{prefix}.idx").unlink()
        write_dataset([9, 8, 7, 5, 6])
    index, expected = dataset(cache, **changed).index, dataset(None, **changed).index
    for name in ("document_index", "sample_index", "shuffle_index"):
        mine, other = getattr(index, name), getattr(expected, name)
        assert mine.dtype == other.dtype
        np.testing.assert_array_equal(mine, other)
    assert len(list((tmp_path / "cache").glob("*-description.txt"))) == 2


def test_a_cached_dataset_gives_the_same_samples(tmp_path: Path, write_dataset: Any) -> None:
    source = IndexedDataset(write_dataset([9, 0, 7, 6, 5]))
    for _ in range(2):
        cached = GPTDataset(source, range(5), 30, 4, 3, cache=IndexCache(tmp_path / "cache"))
        plain = GPTDataset(source, range(5), 30, 4, 3)
        blend = BlendedDataset([cached, plain], [1, 2], 40, IndexCache(tmp_path / "cache"))
        other = BlendedDataset([plain, plain], [1, 2], 40)
        samples = np.arange(30)[::-1]
        np.testing.assert_array_equal(cached.gather(samples), plain.gather(samples))
        np.testing.assert_array_equal(blend.gather(samples), other.gather(samples))
    assert len(list((tmp_path / "cache").glob("*-dataset_index.npy"))) == 1


def _build_slowly(folder: Path, builds: Path) -> None:
    def build() -> Arrays:
        with builds.open("a") as file:
            file.write("x")
        time.sleep(0.3)
        return three()

    assert get(folder, build) == [0, 1, 2]


def test_one_of_many_processes_builds(tmp_path: Path) -> None:
    asked = (tmp_path / "cache", tmp_path / "builds")
    processes = [FORKED.Process(target=_build_slowly, args=asked) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(20)
    assert [process.exitcode for process in processes] == [0] * 4
    assert (tmp_path / "builds").read_text() == "x"


def _hang(folder: Path) -> None:
    def build() -> Arrays:
        time.sleep(60)
        return {}

    get(folder, build)


def test_a_killed_builder_leaves_the_lock_free(tmp_path: Path) -> None:
    process = FORKED.Process(target=_hang, args=(tmp_path,))
    process.start()
    deadline = time.monotonic() + 10
    while not (tmp_path / f"{KEY.name}.lock").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)  # from the lock's file to the lock
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
    assert get(tmp_path) == [0, 1, 2]


@pytest.mark.parametrize("damage", ["truncated", "gone", "no description"])
def test_what_is_not_whole_is_built_again(tmp_path: Path, damage: str) -> None:
    get(tmp_path)
    (array,), (description,) = tmp_path.glob("*.npy"), tmp_path.glob("*-description.txt")
    if damage == "truncated":
        array.write_bytes(array.read_bytes()[:-1])
    else:
        (array if damage == "gone" else description).unlink()
    assert get(tmp_path) == [0, 1, 2]
    assert get(tmp_path, refuse) == [0, 1, 2]


@pytest.mark.parametrize("damage", ["altered", "shorter"])
def test_a_damaged_index_is_named(tmp_path: Path, write_dataset: Any, damage: str) -> None:
    source, cache = IndexedDataset(write_dataset([9, 0, 7, 6, 5])), IndexCache(tmp_path / "cache")
    GPTDataset(source, range(5), 30, 4, 3, cache=cache)
    (path,) = (tmp_path / "cache").glob("*-sample_index.npy")
    rows = np.load(path)
    np.save(path, rows + 1000 if damage == "altered" else rows[:1])
    dataset = GPTDataset(source, range(5), 30, 4, 3, cache=cache)
    with pytest.raises(UserError, match=r"index of .*corpus .*--data-cache-path.* is damaged .*delete it"):
        dataset.gather(np.arange(30))


def test_a_failed_write_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(file: Any, array: Any) -> None:
        file.write(b"a part")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    assert get(tmp_path) == [0, 1, 2]
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    assert "No space left on device" in caplog.text and "--data-cache-path" in caplog.text
    monkeypatch.undo()
    assert get(tmp_path) == [0, 1, 2]


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert get(tmp_path / "file" / "cache") == [0, 1, 2]
    assert "cannot be kept in" in caplog.text and "Not a directory" in caplog.text


def test_an_error_of_the_build_is_not_taken_for_one_of_the_folder(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="built again"):
        get(tmp_path, refuse)
    assert get(tmp_path) == [0, 1, 2]
