"""Fill-in-the-middle: what becomes of documents, and how often."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from megalite.cli.where import sample_spans
from megalite.data.fill_in_middle import FillInMiddle, FillInMiddleDataset, find_marks
from megalite.data.gpt_dataset import gather
from megalite.data.tokenizers.tokenizer import TokenizerFiles, build_tokenizer
from megalite.utils.errors import UserError

EOD, PREFIX, MIDDLE, SUFFIX = 0, 1, 2, 3


class Characters:
    """A token a character, by its code point."""

    vocab_size, eod = 1 << 17, EOD

    def encode(self, text: str) -> list[int]:
        return [ord(char) for char in text]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    def token_id(self, name: str) -> int | None:
        return {"<p>": PREFIX, "<m>": MIDDLE, "<s>": SUFFIX}.get(name)


class Samples:
    """One text a sample; '|' ends a document."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        return np.array([EOD if char == "|" else ord(char) for char in self.texts[index]], np.int64)


def turned(texts: Sequence[str], rate: float, spm_rate: float = 0.5, seed: int = 1) -> FillInMiddleDataset:
    how = FillInMiddle(rate, spm_rate, PREFIX, MIDDLE, SUFFIX, seed)
    return FillInMiddleDataset(Samples(texts), Characters(), how)


def parts(document: list[int]) -> tuple[str, str, str, bool]:
    """Prefix, middle and suffix of a whole turned document, and whether its suffix is first."""
    assert document[0] == PREFIX
    is_suffix_first = document[1] == SUFFIX
    first, second = document.index(SUFFIX), document.index(MIDDLE)
    text = [
        "".join(map(chr, ids))
        for ids in (document[1:first], document[first + 1 : second], document[second + 1 :])
    ]
    if is_suffix_first:
        assert text[0] == ""
        return text[2], "", text[1], True  # prefix and middle stand together
    return text[0], text[2], text[1], False


def test_what_is_cut_can_be_put_together_again() -> None:
    """The first document of each sample is whole; what is pushed out is the sample's end."""
    document = "The quick brown fox jumps over the lazy dog"
    dataset = turned([f"{document}|{'x' * 30}"] * 200, rate=1)
    cuts, num_suffix_first = set(), 0
    for i in range(len(dataset)):
        sample = dataset[i].tolist()
        assert len(sample) == len(dataset.plain[i])
        prefix, middle, suffix, is_suffix_first = parts(sample[: sample.index(EOD)])
        assert prefix + middle + suffix == document
        num_suffix_first += is_suffix_first
        cuts.add((len(prefix), len(middle)))
        assert sample[sample.index(EOD) + 1] == PREFIX
    assert len(cuts) > 100
    assert 70 < num_suffix_first < 130


def test_as_many_as_requested() -> None:
    text = "|".join(["abcdefgh"] * 50)
    assert all((turned([text] * 3, 0)[i] == Samples([text])[0]).all() for i in range(3))
    dataset = turned([text] * 40, rate=0.25, spm_rate=0)
    heads = [(dataset[i] == PREFIX).sum() / ((dataset[i] == EOD).sum() + 1) for i in range(40)]
    assert 0.21 < np.mean(heads) < 0.29


def test_a_function_of_seed_and_number_alone() -> None:
    texts = [f"document {i}, of some length|and {i} another" for i in range(20)]
    one, again, other = turned(texts, 0.7), turned(texts, 0.7), turned(texts, 0.7, seed=2)
    order = np.array([7, 3, 19, 3])
    rows = gather(turned([texts[0].ljust(40, "y")[:40]] * 20, 0.7), order)
    assert rows.shape == (4, 40) and (rows[1] == rows[3]).all() and (rows[0] != rows[1]).any()
    _ = [again[i] for i in (5, 2)]
    assert all((one[i] == again[i]).all() for i in range(20))
    assert any((one[i] != other[i]).any() for i in range(20))


def test_what_does_not_decode_stays_as_it_is() -> None:
    text = "broken \ufffd text|fine"
    sample = turned([text], rate=1)[0].tolist()
    assert sample[: sample.index(EOD)] == [ord(char) for char in "broken \ufffd text"]
    assert sample[sample.index(EOD) + 1] == PREFIX


def test_empty_documents_and_short_encodings() -> None:
    assert turned(["||"], rate=1)[0].tolist() == [EOD, EOD]

    class Merging(Characters):
        """Encodes to fewer tokens than the text was of."""

        def encode(self, text: str) -> list[int]:
            return [ord(char) for char in text[::4]]

    how = FillInMiddle(1, 0, PREFIX, MIDDLE, SUFFIX, 1)
    sample = FillInMiddleDataset(Samples(["a" * 40]), Merging(), how)[0]
    assert len(sample) == 40 and sample[-1] == EOD


def test_with_a_real_tokenizer(write_dataset: Any, tmp_path: Any) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    from tests.corpora import build_datasets

    model = tokenizers.ByteLevelBPETokenizer()
    names = ["<|endoftext|>", "<p>", "<m>", "<s>"]
    model.train_from_iterator(["ab abc abcd"] * 9, vocab_size=270, special_tokens=names, show_progress=False)
    model.save(str(tmp_path / "t.json"))
    tokenizer = build_tokenizer(None, TokenizerFiles(tokenizer_model=str(tmp_path / "t.json")))
    flags = {"--fim-prefix-token": "<p>", "--fim-middle-token": "<m>", "--fim-suffix-token": "<s>"}
    assert find_marks(tokenizer, flags) == (1, 2, 3)
    with pytest.raises(UserError, match="--fim-middle-token <none>: not in the tokenizer"):
        find_marks(tokenizer, {**flags, "--fim-middle-token": "<none>"})
    with pytest.raises(UserError, match="the same token twice"):
        find_marks(tokenizer, {**flags, "--fim-middle-token": "<p>"})
    plain = build_datasets([write_dataset([30] * 3, first=65)], "1", 16, (4, 0, 0), seed=1).train
    assert plain is not None
    dataset = FillInMiddleDataset(plain, tokenizer, FillInMiddle(1, 0.5, 1, 2, 3, seed=1))
    assert all(len(dataset[i]) == 17 for i in range(4)) and any((dataset[i] == 1).any() for i in range(4))
    assert np.concatenate([each.tokens for each in sample_spans(dataset, 2)]).tolist() == plain[2].tolist()
