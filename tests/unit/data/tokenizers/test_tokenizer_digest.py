"""The tokenizer's digest beside a corpus."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from megalite.data.tokenizers.tokenizer import (
    ByteTokenizer,
    NullTokenizer,
    TokenizerFiles,
    build_tokenizer,
    check_tokenizer,
    digest_path,
    read_tokenizer_digest,
    tokenizer_digest,
    write_tokenizer_digest,
)
from megalite.utils.errors import UserError

TEXTS = ["In the beginning was the word, and the word was with the light.", "1234 567"] * 20


def train(folder: Path, vocab_size: int, texts: Sequence[str] = TEXTS) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    folder.mkdir()
    model = tokenizers.ByteLevelBPETokenizer()
    model.train_from_iterator(
        texts, vocab_size=vocab_size, special_tokens=["<|endoftext|>"], show_progress=False
    )
    model.save_model(str(folder))
    model.save(str(folder / "tokenizer.json"))
    return folder


class Swapped(ByteTokenizer):
    """Two letters have each other's ids."""

    def encode(self, text: str) -> list[int]:
        return [{97: 98, 98: 97}.get(i, i) for i in super().encode(text)]


def test_what_gives_other_tokens_has_another_digest(tmp_path: Path) -> None:
    paths = [train(tmp_path / "a", 280), train(tmp_path / "b", 290), train(tmp_path / "c", 280, ["ab"] * 9)]
    bpe = [build_tokenizer(None, TokenizerFiles(name_or_path=str(path))) for path in paths]
    all_of_them = [*bpe, ByteTokenizer(), Swapped(), NullTokenizer(256), NullTokenizer(300)]
    digests = [tokenizer_digest(tokenizer) for tokenizer in all_of_them]
    assert len(set(digests)) == len(digests)
    assert all(len(digest) == 64 for digest in digests)


def test_it_depends_on_what_is_done_and_not_on_the_form(tmp_path: Path) -> None:
    folder = train(tmp_path / "a", 280)
    text = (folder / "tokenizer.json").read_text()
    (folder / "spaced.json").write_text(json.dumps(json.loads(text), indent=4))
    digests = {
        tokenizer_digest(build_tokenizer(None, TokenizerFiles(tokenizer_model=str(folder / name))))
        for name in ("tokenizer.json", "spaced.json")
    }
    two_files = {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}
    assert digests == {tokenizer_digest(build_tokenizer(None, TokenizerFiles(**two_files)))}


def test_stored_and_compared(tmp_path: Path) -> None:
    prefix, other = str(tmp_path / "corpus"), str(tmp_path / "other")
    assert read_tokenizer_digest(prefix) is None
    check_tokenizer([prefix, other], Swapped())  # nothing known of either
    write_tokenizer_digest(prefix, ByteTokenizer())
    assert read_tokenizer_digest(prefix) == tokenizer_digest(ByteTokenizer())
    check_tokenizer([prefix, other, prefix], ByteTokenizer())
    with pytest.raises(UserError, match=f"{prefix}: made with another tokenizer") as caught:
        check_tokenizer([other, prefix], Swapped())
    assert f"delete {digest_path(prefix)}" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.tokenizer.json"]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "3"])
def test_a_damaged_file_is_named(tmp_path: Path, content: str) -> None:
    prefix = str(tmp_path / "corpus")
    Path(digest_path(prefix)).write_text(content)
    with pytest.raises(UserError, match=f"cannot read {digest_path(prefix)}"):
        read_tokenizer_digest(prefix)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write .*: No such file"):
        write_tokenizer_digest(str(tmp_path / "none" / "corpus"), ByteTokenizer())


def test_the_digest_of_a_corpus_in_a_store_is_read(tmp_path: Path) -> None:
    memory = pytest.importorskip("fsspec.implementations.memory").MemoryFileSystem()
    tokenizer = ByteTokenizer()
    write_tokenizer_digest(str(tmp_path / "corpus"), tokenizer)
    memory.pipe_file(
        "/digests/corpus.tokenizer.json", Path(digest_path(str(tmp_path / "corpus"))).read_bytes()
    )
    check_tokenizer(["memory://digests/corpus", "memory://digests/other"], tokenizer)
    assert read_tokenizer_digest("memory://digests/other") is None
    assert read_tokenizer_digest(f"file://{tmp_path}/corpus") == tokenizer_digest(tokenizer)
    with pytest.raises(UserError, match=r"memory://digests/corpus: made with another tokenizer"):
        check_tokenizer(["memory://digests/corpus"], Swapped())
    memory.pipe_file("/digests/corpus.tokenizer.json", b"{")
    with pytest.raises(UserError, match=r"cannot read memory://digests/corpus.tokenizer.json"):
        check_tokenizer(["memory://digests/corpus"], tokenizer)
