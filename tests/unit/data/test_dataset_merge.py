"""Merging: the bytes are those of one writer and of Megatron-core, and nothing half-written stays behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.data import dataset_merge, indexed_dataset
from megalite.data.dataset_merge import find_prefixes, merge_datasets
from megalite.data.indexed_dataset import IndexedWriter
from megalite.data.tokenizers.tokenizer import (
    ByteTokenizer,
    NullTokenizer,
    read_tokenizer_digest,
    write_tokenizer_digest,
)
from megalite.utils.errors import UserError
from tests.chat import write_masked

DOCUMENTS = ([[[1, 2, 3], [4]], [[5]]], [], [[[6]], [], [[], [7, 8]]])


def write(prefix: Path, documents: list[list[list[int]]], dtype: str = "uint16") -> str:
    with IndexedWriter(str(prefix), dtype) as writer:
        for sequences in documents:
            writer.add_document(sequences)
    return str(prefix)


@pytest.mark.parametrize("dtype", ["uint16", "int32", "uint8"])
def test_merged_bytes_are_those_of_one_writer(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [write(tmp_path / f"part{i}", documents, dtype) for i, documents in enumerate(DOCUMENTS)]
    whole = write(tmp_path / "whole", [document for part in DOCUMENTS for document in part], dtype)
    for block in (1, 2, 1 << 20):
        monkeypatch.setattr(dataset_merge, "_BLOCK", block)
        monkeypatch.setattr(indexed_dataset, "BLOCK", block)
        merged = merge_datasets(parts, str(tmp_path / "merged"), overwrite=True)
        for ending in (".bin", ".idx"):
            assert Path(f"{whole}{ending}").read_bytes() == (tmp_path / f"merged{ending}").read_bytes()
    assert (merged.num_documents, merged.num_sequences, merged.num_tokens) == (5, 6, 8)


def test_merged_bytes_are_megatrons(tmp_path: Path) -> None:
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    parts = [write(tmp_path / f"part{i}", documents) for i, documents in enumerate(DOCUMENTS)]
    builder = indexed.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for part in parts:
        if Path(f"{part}.bin").stat().st_size:  # an empty file cannot be mapped there
            builder.add_index(part)
    builder.finalize(str(tmp_path / "theirs.idx"))
    merge_datasets(parts, str(tmp_path / "ours"))
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"ours{ending}").read_bytes() == (tmp_path / f"theirs{ending}").read_bytes()


def test_what_cannot_be_merged_is_refused(tmp_path: Path, write_dataset: Callable[..., str]) -> None:
    small, wide = write_dataset([3], "small"), write_dataset([3], "wide", "int32")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(UserError, match=r"small holds uint16 tokens and .*wide int32"):
        merge_datasets([small, wide], str(tmp_path / "out"))
    with pytest.raises(UserError, match=r"small is one of the inputs"):
        merge_datasets([small], f"{tmp_path}/./small", overwrite=True)
    with pytest.raises(UserError, match=r"wide\.bin exists.*--overwrite"):
        merge_datasets([small], wide)
    with pytest.raises(
        UserError, match=r"--output-prefix memory://out is a URL: pass a path on this machine"
    ):
        merge_datasets([small], "memory://out")
    Path(f"{wide}.bin").write_bytes(b"x" * 11)
    with pytest.raises(UserError, match=r"wide\.bin has 11 bytes"):
        merge_datasets([small, wide], str(tmp_path / "out"))
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize(
    ("numbers", "missing"),
    [((0, 1, 2, 3), ""), ((1, 2, 3, 4), ""), ((3, 0), "lack 2 .*00001, 00002"), ((1, 2, 3), "00000")],
)
def test_all_parts_of_a_corpus_are_merged_or_none(
    tmp_path: Path, write_dataset: Callable[..., str], numbers: tuple[int, ...], missing: str
) -> None:
    parts = [write_dataset([3], f"c-{number:05}-of-00004_text_document") for number in numbers]
    other = write_dataset([3], "other-00000-of-00001_text_document")
    if not missing:
        assert merge_datasets([*parts, other], str(tmp_path / "out")).num_documents == 5
        return
    with pytest.raises(UserError, match=rf"c-\*-of-00004_text_document has 4 parts, .*{missing}\): pass all"):
        merge_datasets([*parts, other], str(tmp_path / "out"))


def test_full_disk_leaves_nothing(
    tmp_path: Path, write_dataset: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write_dataset([3])

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dataset_merge.os, "fsync", fail)
    with pytest.raises(UserError, match=r"cannot write .*out\.bin and \.idx: No space left"):
        merge_datasets([prefix], str(tmp_path / "out"))
    assert sorted(os.listdir(tmp_path)) == ["corpus.bin", "corpus.idx"]


def test_folders_stand_for_their_datasets(tmp_path: Path, write_dataset: Callable[..., str]) -> None:
    b, a = write_dataset([1], "b"), write_dataset([1], "a")
    assert find_prefixes([str(tmp_path)]) == [a, b]
    assert find_prefixes([f"{b}.bin", a]) == [b, a]
    with pytest.raises(UserError, match="named twice"):
        find_prefixes([a, str(tmp_path)])
    os.remove(f"{a}.idx")
    with pytest.raises(UserError, match=r"/a has only one of \.bin and \.idx"):
        find_prefixes([str(tmp_path)])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no"):
        find_prefixes([str(tmp_path / "empty")])


def test_a_source_cut_while_it_is_merged_gives_no_output(
    tmp_path: Path, write_dataset: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, join = write_dataset([2000, 3000]), dataset_merge._write_blocks

    def join_after_a_cut(*arguments: Any) -> None:
        os.truncate(f"{prefix}.bin", 100)
        join(*arguments)

    monkeypatch.setattr(dataset_merge, "_write_blocks", join_after_a_cut)
    with pytest.raises(UserError, match=r"corpus\.bin became shorter"):
        merge_datasets([prefix], str(tmp_path / "out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.bin", "corpus.idx"]


def test_the_tokenizer_goes_with_the_tokens(tmp_path: Path, write_dataset: Callable[..., str]) -> None:
    a, b, out = write_dataset([1], "a"), write_dataset([2], "b"), str(tmp_path / "out")
    write_tokenizer_digest(a, ByteTokenizer())
    merge_datasets([a, b], out)
    assert read_tokenizer_digest(out) is None, "what made b is unknown"
    write_tokenizer_digest(b, ByteTokenizer())
    merge_datasets([a, b], out, overwrite=True)
    assert read_tokenizer_digest(out) == read_tokenizer_digest(a) is not None
    merge_datasets([f"file://{a}", b], out, overwrite=True)
    assert read_tokenizer_digest(out) == read_tokenizer_digest(a), "of a URL too"
    write_tokenizer_digest(b, NullTokenizer(300))
    with pytest.raises(UserError, match=r"/a and .*/b were made with different tokenizers"):
        merge_datasets([a, b], out, overwrite=True)


def test_conversations_and_text_are_not_merged(tmp_path: Path) -> None:
    """The text would have no answers. `test_preprocess_chat` merges datasets of conversations."""
    text = write(tmp_path / "text", [[[1, 2]]])
    chat = write_masked(str(tmp_path / "chat"), [5])
    with pytest.raises(UserError, match=r"chat holds conversations and .*text: merge them separately"):
        merge_datasets([text, chat], str(tmp_path / "merged"))
