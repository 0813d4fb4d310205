"""The cache of indices: one build whoever asks, no stale hit, nothing half-written, no lock of the dead."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.data import index_cache, storage
from megalite.data.blend import BlendedDataset
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.index_cache import Arrays, CacheKey, IndexCache, checksum
from megalite.data.indexed_dataset import IndexedDataset
from megalite.utils.errors import UserError

KEY = CacheKey("GPTDataset", "train", {"seed": 1}, 3, "corpus")
FORKED = multiprocessing.get_context("fork")


def three() -> Arrays:
    return {"numbers": np.arange(3)}


def refuse() -> Arrays:
    raise AssertionError("built again")


def get(folder: Path, build: Any = three, key: CacheKey = KEY) -> list[int]:
    result: list[int] = IndexCache(folder).get(key, ["numbers"], build).arrays["numbers"].tolist()
    return result


def test_second_time_maps_what_the_first_built(tmp_path: Path) -> None:
    assert get(tmp_path / "new" / "folder") == [0, 1, 2]
    assert get(tmp_path / "new" / "folder", refuse) == [0, 1, 2]
    cached = IndexCache(tmp_path / "new" / "folder").get(KEY, ["numbers"], refuse)
    assert len(cached.files) == 1 and not cached.arrays["numbers"].flags.writeable
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
        arguments: dict[str, Any] = {
            "sequences": range(5),
            "num_samples": 20,
            "seq_length": 4,
            "seed": 3,
            **changed,
        }
        return GPTDataset(source, cache=cache, **arguments)

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
    (order,) = (tmp_path / "cache").glob("*-dataset_index.npy")
    os.truncate(order, 0)
    with pytest.raises(UserError, match=r"dataset_index\.npy became shorter"):
        blend.gather(samples)


def _build_slowly(folder: Path, builds: Path) -> None:
    def build() -> Arrays:
        with builds.open("a") as file:
            file.write("x")
        time.sleep(0.3)
        return three()

    assert get(folder, build) == [0, 1, 2]


def test_one_of_many_processes_builds(tmp_path: Path) -> None:
    arguments = (tmp_path / "cache", tmp_path / "builds")
    processes = [FORKED.Process(target=_build_slowly, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0] * 4
    assert (tmp_path / "builds").read_text() == "x"


def _hang(folder: Path) -> None:
    def build() -> Arrays:
        time.sleep(1000)
        return {}

    get(folder, build)


def test_a_killed_builder_leaves_the_lock_free(tmp_path: Path) -> None:
    process = FORKED.Process(target=_hang, args=(tmp_path,))
    process.start()
    deadline = time.monotonic() + 300
    while not (tmp_path / f"{KEY.name}.lock").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)  # from the lock's file to the lock
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(300)
    assert get(tmp_path) == [0, 1, 2]


def _rewrite(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """Writes a changed array into its file, as numpy does."""
    return lambda path: np.save(path, change(np.load(path)))


def _flip(at: int) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        raw = bytearray(path.read_bytes())
        raw[at] ^= 1
        path.write_bytes(bytes(raw))

    return flip


def _link_to_folder(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.parent)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda path: os.truncate(path, path.stat().st_size - 1), "not the size"),
    "empty": (lambda path: os.truncate(path, 0), "truncated to 0 bytes"),
    "longer": (lambda path: os.truncate(path, path.stat().st_size + 8), "does not match its checksum"),
    "gone": (Path.unlink, "No such file"),
    "a fifo": (lambda path: (path.unlink(), os.mkfifo(path)), "No such device"),
    "a folder": (_link_to_folder, "Is a directory"),
    "zeroed": (_rewrite(lambda values: 0 * values), "does not match its checksum"),
    "reversed": (_rewrite(lambda values: values[::-1].copy()), "does not match its checksum"),
    "one bit": (_flip(-20), "does not match its checksum"),
    "other dtype": (_rewrite(lambda values: values.astype(np.float64)), "does not match its checksum"),
    "other width": (_rewrite(lambda values: values.astype(np.int16)), "not the size"),
    "other shape": (_rewrite(lambda values: values[:2]), "does not match its checksum"),
    "scalar": (_rewrite(lambda values: values[0]), "does not match its checksum"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_array_is_built_again_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    get(tmp_path)
    (array,) = tmp_path.glob("*.npy")
    change, said = DAMAGES[damage]
    change(array)
    assert get(tmp_path) == [0, 1, 2]
    (warning,) = caplog.messages
    assert str(tmp_path) in warning and "is damaged and will be rebuilt" in warning and said in warning
    assert get(tmp_path, refuse) == [0, 1, 2]


def _change_description(**changed: Any) -> Callable[[Path], object]:
    return lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


DESCRIPTIONS: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: path.write_text(""), "Expecting value"),
    "no JSON": (lambda path: path.write_bytes(b"\xff\xfe{"), "decode"),
    "nested": (lambda path: path.write_text("[" * 100_000), "nested too deeply"),
    "a list": (lambda path: path.write_text("[]"), "no checksums"),
    "of before checksums": (_change_description(arrays=None), "no checksums"),
    "of another index": (_change_description(seed=2), "describes another index"),
    "other dtype": (
        _change_description(arrays={"numbers": {"dtype": "<u8", "shape": [3], "crc32": "0"}}),
        "does not match its checksum",
    ),
    "no dtype": (
        _change_description(arrays={"numbers": {"dtype": "S0", "shape": [3], "crc32": "0"}}),
        "the type",
    ),
    "huge shape": (
        _change_description(arrays={"numbers": {"dtype": "<i8", "shape": [2**70], "crc32": "0"}}),
        "truncated to",
    ),
    "negative shape": (
        _change_description(arrays={"numbers": {"dtype": "<i8", "shape": [-(2**70)], "crc32": "0"}}),
        "dimension",
    ),
}


@pytest.mark.parametrize("damage", DESCRIPTIONS)
def test_a_damaged_description_is_built_again_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    get(tmp_path)
    (description,) = tmp_path.glob("*-description.txt")
    change, said = DESCRIPTIONS[damage]
    change(description)
    assert get(tmp_path) == [0, 1, 2]
    (warning,) = caplog.messages
    assert "is damaged and will be rebuilt" in warning and said in warning
    assert get(tmp_path, refuse) == [0, 1, 2]


def test_an_entry_without_description_is_not_there(tmp_path: Path) -> None:
    get(tmp_path)
    next(tmp_path.glob("*-description.txt")).unlink()
    assert get(tmp_path) == [0, 1, 2]


def test_the_checksum_is_of_type_shape_and_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_cache, "_CHECKSUM_BLOCK", 16)
    values = np.arange(1, 13, dtype=np.int32)
    sums = {checksum(each) for each in (values, values.view(np.uint32), values.reshape(6, 2), values[:11])}
    assert len(sums) == 4
    for i in range(12):
        changed = values.copy()
        changed[i] ^= 1 << i
        sums.add(checksum(changed))
    assert len(sums) == 16
    swapped = np.concatenate([values[4:8], values[:4], values[8:]])
    assert checksum(swapped) not in sums
    assert checksum(values[:0]) == checksum(values[:0].copy())


@pytest.mark.parametrize("name", ["document_index", "sample_index", "shuffle_index"])
def test_an_array_changed_in_use_is_named(
    tmp_path: Path, write_dataset: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Out-of-range numbers, and an array of which nothing or a part of a page is left."""
    monkeypatch.setattr(storage, "STATUS_AGE_MS", 0)
    source, cache = IndexedDataset(write_dataset([9, 0, 7, 6, 5])), IndexCache(tmp_path / "cache")
    dataset = GPTDataset(source, range(5), 30, 4, 3, cache=cache)
    samples = np.arange(30)
    expected = dataset.gather(samples)
    (path,) = (tmp_path / "cache").glob(f"*-{name}.npy")
    for size in (0, path.stat().st_size - 1):
        os.truncate(path, size)
        with pytest.raises(UserError, match=f"{name}.npy became shorter or unreadable while it was in use"):
            dataset.gather(samples)
        dataset = GPTDataset(source, range(5), 30, 4, 3, cache=cache)  # builds it again
        np.testing.assert_array_equal(dataset.gather(samples), expected)
    raw = path.read_bytes()
    with path.open("r+b") as file:  # in place, and of the same size
        file.write(raw[:128] + b"\x7f" * (len(raw) - 128))
    with pytest.raises(UserError, match=f"{name}.npy was written to or touched while it was in use"):
        dataset.gather(samples)


@pytest.mark.parametrize("suffix", [".lock", "-numbers.npy", "-numbers.npy.partial", "-description.txt"])
def test_no_write_follows_a_link(tmp_path: Path, suffix: str) -> None:
    for name in ("a file", "nothing yet"):
        folder, target = tmp_path / f"cache for {name}", tmp_path / name
        if name == "a file":
            target.write_text("precious")
        folder.mkdir()
        (folder / f"{KEY.name}{suffix}").symlink_to(target)
        assert get(folder) == [0, 1, 2]
        assert target.read_text() == "precious" if name == "a file" else not target.exists()


def test_a_fifo_for_a_lock_blocks_no_process(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f"{KEY.name}.lock")
    assert get(tmp_path) == [0, 1, 2]


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


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert get(tmp_path / "file" / "cache") == [0, 1, 2]
    assert "cannot be stored in" in caplog.text and "Not a directory" in caplog.text


def test_an_error_of_the_build_is_not_taken_for_one_of_the_folder(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="built again"):
        get(tmp_path, refuse)
    assert get(tmp_path) == [0, 1, 2]
