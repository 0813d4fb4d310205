"""The fast engine for byte-level BPE: its ids, and when it is not used."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data.tokenizers.hf_tokenizer import (
    SAMPLE,
    EncodeArrays,
    HuggingFaceTokenizer,
    fast_engine,
    reference_engine,
)

tokenizers = pytest.importorskip("tokenizers")
Encode = Callable[[bytes], npt.NDArray[np.uint32]]


def train() -> Any:
    model = tokenizers.ByteLevelBPETokenizer()
    texts = [*SAMPLE, "In the beginning was the word, and the word was with the light."] * 20
    model.train_from_iterator(texts, vocab_size=400, special_tokens=["<|endoftext|>"], show_progress=False)
    return tokenizers.Tokenizer.from_str(model.to_str())


def encode_alone(library: Any, text: bytes) -> npt.NDArray[np.uint32]:
    return np.array(library.encode(text.decode(), add_special_tokens=False).ids, np.uint32)


@pytest.fixture(scope="module")
def library() -> Any:
    return train()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Encode], list[str]]:
    """Installs an engine of this encoding; gives the descriptions that it was made from."""

    def install(encode: Encode) -> list[str]:
        made: list[str] = []

        def from_json(text: str) -> object:
            made.append(text)
            return SimpleNamespace(encode=encode)

        module = SimpleNamespace(Tokenizer=SimpleNamespace(from_json=from_json))
        monkeypatch.setitem(sys.modules, "gigatoken", module)  # type: ignore[arg-type]
        return made

    return install


def test_one_that_agrees_is_taken(library: Any, install: Any) -> None:
    calls = []

    def encode(text: bytes) -> npt.NDArray[np.uint32]:
        calls.append(text)
        return encode_alone(library, text)

    install(encode)
    tokenizer = HuggingFaceTokenizer(library, "x")
    assert tokenizer.encode_batch(["the word"]) == [tokenizer.encode("the word")]
    assert tokenizer.encode_batch(("the",)) == [tokenizer.encode("the")]
    assert calls[-2:] == [b"the word", b"the"]  # after the comparison
    assert b"some<|endoftext|> text <|endoftext|><|endoftext|>\n" in calls[:-2]


@pytest.mark.parametrize("where", [3, -1])
def test_one_that_differs_anywhere_is_not_used(library: Any, install: Any, where: int) -> None:
    texts: list[bytes] = []
    install(lambda text: [texts.append(text), encode_alone(library, text)][1])
    assert fast_engine(library) is not None
    different = texts[where]
    install(lambda text: encode_alone(library, text)[:: -1 if text == different else 1])
    assert fast_engine(library) is None
    assert HuggingFaceTokenizer(library, "x").encode_batch(["a b"]) == [library.encode("a b").ids]


def test_one_that_does_not_know_the_tokenizer_is_not_used(library: Any, install: Any) -> None:
    class Panic(BaseException):
        """As Rust's come through."""

    def encode(text: bytes) -> npt.NDArray[np.uint32]:
        raise Panic

    install(encode)
    assert fast_engine(library) is None


def test_only_byte_level_bpe_without_dropout_is_tried(install: Any) -> None:
    made = install(lambda text: np.zeros(0, np.uint32))
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    random = train()
    random.model.dropout = 0.1
    for reference in (words, random):
        assert fast_engine(reference) is None
    assert made == []


def test_without_the_package_the_library_serves(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    assert fast_engine(library) is None
    assert HuggingFaceTokenizer(library, "x").encode_batch(SAMPLE) == [
        library.encode(text, add_special_tokens=False).ids for text in SAMPLE
    ]


@pytest.fixture(scope="module")
def gigatoken_engine(library: Any) -> EncodeArrays:
    pytest.importorskip("gigatoken")
    engine = fast_engine(library)
    assert engine is not None
    return engine


@given(texts=st.lists(st.text(), max_size=8))
@settings(max_examples=100, deadline=None)
def test_the_real_one_gives_what_the_library_gives(
    library: Any, gigatoken_engine: EncodeArrays, texts: list[str]
) -> None:
    encoded = [text.encode() for text in texts]
    found = gigatoken_engine(encoded)
    assert [ids.tolist() for ids in found] == [ids.tolist() for ids in reference_engine(library)(encoded)]
