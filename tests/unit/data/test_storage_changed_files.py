"""Files that another process changes while a dataset reads them: every reader names them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.data import _index_builder, storage
from megalite.data.bert_dataset import BertDataset, BertOptions, WordPieces
from megalite.data.blend import BlendedDataset, Epochs
from megalite.data.build_datasets import DatasetSplits, NamedDataset
from megalite.data.fill_in_middle import FillInMiddle, FillInMiddleDataset
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.index_cache import IndexCache
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.samples import MockDataset, random_tokens
from megalite.data.tokenizers.tokenizer import ByteTokenizer
from megalite.utils.errors import UserError


def _write_over(path: Path, keeps_time: bool) -> None:
    """Change a file's bytes in place, and leave its size."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(40)
        file.write(b"\x01\x00\x02\x00\x03\x00\x04\x00")
    if keeps_time:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(8))


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "appended to": (_append, "became longer"),
    "of the same size": (lambda path: _write_over(path, keeps_time=False), "was written to or touched"),
    "of the same size and time": (
        lambda path: _write_over(path, keeps_time=True),
        "was written to, and its modification time set back,",
    ),
}


@pytest.fixture
def old_dataset(write_dataset: Any) -> str:
    """A dataset of other times than what a test writes to it, whatever the clock's resolution."""
    prefix = str(write_dataset([10] * 3000))
    for ending in (".bin", ".idx"):
        os.utime(f"{prefix}{ending}", (1e9, 1e9))
    time.sleep(0.02)
    return prefix


@pytest.mark.parametrize("ending", [".bin", ".idx"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_changed_while_it_is_read_is_named(
    old_dataset: str, monkeypatch: pytest.MonkeyPatch, ending: str, change: str
) -> None:
    """Training on other data than the checkpoint says must not look like success."""
    indexed = IndexedDataset(old_dataset)
    dataset = GPTDataset(indexed, range(3000), 100, 64, seed=3)
    dataset.gather(np.arange(100))
    write, what = CHANGES[change]
    write(Path(f"{old_dataset}{ending}"))
    said = f"{old_dataset}{ending} {what} while it was in use"
    for check in (dataset.verify_files, indexed.check_files, lambda: indexed[2999]):
        with pytest.raises(UserError, match=said):
            check()
    monkeypatch.setattr(storage, "STATUS_AGE_MS", 0)
    with pytest.raises(UserError, match=said):
        dataset.gather(np.arange(100))


def test_offsets_that_lead_out_of_the_corpus_are_the_files_fault(old_dataset: str) -> None:
    """Nothing is cached here, so nothing else can be to blame."""
    dataset = GPTDataset(IndexedDataset(old_dataset), range(3000), 100, 64, seed=3)
    dataset.gather(np.arange(100))
    with open(f"{old_dataset}.idx", "r+b") as file:
        file.seek(34 + 4 * 3000)
        file.write(b"\0\0\0\0\0\0\0\x40" * 3000)
    with pytest.raises(UserError, match=rf"{old_dataset}\.idx was written to .* while it was in use"):
        dataset.gather(np.arange(100))


@pytest.mark.parametrize("value", [b"\xff\xff\xff\xff", b"\x09\0\0\0"], ids=["out of range", "another order"])
@pytest.mark.parametrize("kind", ["GPT", "BERT"])
def test_an_order_of_lengths_that_changed_meanwhile_is_not_kept(
    old_dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, value: bytes
) -> None:
    """The next run would find it under the digest of the lengths before."""
    name = {"GPT": "build_sample_index", "BERT": "build_sentence_samples"}[kind]
    build = getattr(_index_builder, name)

    def build_of_others(*arguments: Any, **options: Any) -> Any:
        with open(f"{old_dataset}.idx", "r+b") as file:
            file.seek(34)
            file.write(value * 3000)
        return build(*arguments, **options)

    monkeypatch.setattr(_index_builder, name, build_of_others)
    indexed, cache = IndexedDataset(old_dataset), IndexCache(tmp_path / "cache")
    bert = BertOptions(64, 3, WordPieces.mock(30000), 0.15, 0.1, has_two_segments=False)
    order = {
        "GPT": lambda: GPTDataset(indexed, range(3000), 100, 64, 3, cache=cache),
        "BERT": lambda: BertDataset(indexed, range(3000), 100, bert, cache=cache),
    }[kind]
    with pytest.raises(UserError, match=rf"{old_dataset}\.idx was written to or touched while it was in use"):
        order()
    assert not list((tmp_path / "cache").glob("*-description.txt"))


def test_other_rights_names_and_owners_are_no_change(old_dataset: str, tmp_path: Path) -> None:
    indexed = IndexedDataset(old_dataset)
    dataset = GPTDataset(indexed, range(3000), 100, 64, seed=3)
    expected = dataset.gather(np.arange(100))
    file, link = Path(f"{old_dataset}.bin"), tmp_path / "link.bin"
    for act in (lambda: file.chmod(0o444), lambda: link.hardlink_to(file), link.unlink, file.unlink):
        act()
        dataset.verify_files()
        np.testing.assert_array_equal(dataset.gather(np.arange(100)), expected)
        indexed.check_files()


@pytest.mark.parametrize("order", ["GPT", "BERT", "blend"])
def test_numbers_that_lead_out_of_the_data_are_the_caches_fault(
    old_dataset: str, tmp_path: Path, order: str
) -> None:
    """A status that was looked at a moment ago may hide the change."""
    indexed, cache = IndexedDataset(old_dataset), IndexCache(tmp_path)
    bert = BertOptions(64, 3, WordPieces.mock(30000), 0.15, 0.1, has_two_segments=False)
    plain = GPTDataset(indexed, range(3000), 100, 64, seed=3)
    dataset: Any = {
        "GPT": lambda: GPTDataset(indexed, range(3000), 100, 64, 3, cache=cache),
        "BERT": lambda: BertDataset(indexed, range(3000), 100, bert, cache=cache),
        "blend": lambda: BlendedDataset([plain], [1.0], 100, cache),
    }[order]()
    dataset[0]
    for path in tmp_path.glob("*.npy"):
        os.utime(path, (2e9, 2e9))
        with path.open("r+b") as file:
            file.seek(128)
            if order == "BERT":
                file.write(bytes(8))  # the first sentence of the first sample; the last is the next number
            file.write(b"\x77\x77\x77\x77\0\0\0\0" * ((path.stat().st_size - file.tell()) // 8))
    with pytest.raises(UserError, match=r"\.npy was written to or touched while it was in use"):
        dataset[0]


@pytest.mark.parametrize("wrap", ["BERT", "fill in the middle", "blend", "epochs", "splits", "named split"])
def test_every_dataset_checks_the_files_below_it(old_dataset: str, wrap: str) -> None:
    indexed = IndexedDataset(old_dataset)
    plain = GPTDataset(indexed, range(3000), 100, 64, seed=3)
    bert = BertOptions(64, 3, WordPieces.mock(30000), 0.15, 0.1, has_two_segments=False)
    wrapped: dict[str, Any] = {
        "BERT": BertDataset(indexed, range(3000), 100, bert),
        "fill in the middle": FillInMiddleDataset(plain, ByteTokenizer(), FillInMiddle(1.0, 0.5, 1, 2, 3, 4)),
        "blend": BlendedDataset([plain], [1.0], 100),
        "epochs": Epochs(plain, 200),
        "splits": DatasetSplits(
            MockDataset(5, 0, 0, partial(random_tokens, seq_length=4, vocab_size=9)), None, plain
        ),
        "named split": DatasetSplits(plain, None, None, (NamedDataset("valid", "a", Epochs(plain, 1)),)),
    }
    wrapped[wrap].verify_files()
    _append(Path(f"{old_dataset}.bin"))
    with pytest.raises(UserError, match="became longer"):
        wrapped[wrap].verify_files()
