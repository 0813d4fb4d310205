"""Words and runs of words against Python's own, and the recall of MinHash against its formula."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data.prepare import fingerprints
from megalite.data.prepare.fingerprints import band_keys, exact_keys, shingles, word_hashes

TEXTS = st.lists(st.text(st.sampled_from("aAbB9 .-\n\0éÉß世界ไ𠀀"), max_size=30), min_size=1, max_size=5)
WORD = re.compile(r"[世界ไ𠀀]|[^\W世界ไ𠀀]+")


@settings(max_examples=200, deadline=None)
@given(texts=TEXTS, chunk=st.integers(1, 5))
def test_words_are_those_of_a_regular_expression(texts: list[str], chunk: int) -> None:
    words = [WORD.findall(text.lower()) for text in texts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprints, "_CHUNK_WORDS", chunk)
        hashes, counts = word_hashes(texts)
    assert hashes.tolist() == word_hashes(texts)[0].tolist()
    assert counts.tolist() == list(map(len, words))
    flat = [word for each in words for word in each]
    assert len(set(zip(flat, hashes.tolist(), strict=True))) == len(set(flat)) == len(set(hashes.tolist()))


@settings(max_examples=200, deadline=None)
@given(
    texts=st.lists(st.lists(st.sampled_from("abc"), max_size=7), max_size=5),
    length=st.integers(1, 4),
    or_shorter=st.booleans(),
)
def test_shingles_are_the_runs_of_words(texts: list[list[str]], length: int, or_shorter: bool) -> None:
    def runs(words: list[str]) -> list[tuple[str, ...]]:
        whole = [tuple(words[i : i + length]) for i in range(len(words) - length + 1)]
        return whole or ([tuple(words)] if or_shorter and words else [])

    hashes, counts = shingles(*word_hashes([" ".join(words) for words in texts]), length, or_shorter)
    expected = [runs(words) for words in texts]
    flat = [run for each in expected for run in each]
    assert counts.tolist() == list(map(len, expected))
    assert len(set(zip(flat, hashes.tolist(), strict=True))) == len(set(flat)) == len(set(hashes.tolist()))


def test_exact_keys_are_xxh3() -> None:
    xxhash = pytest.importorskip("xxhash")
    texts = ["", "a", "ä" * 300]
    assert [row.tobytes() for row in exact_keys(texts)] == [
        xxhash.xxh3_128(text.encode()).digest() for text in texts
    ]


@pytest.mark.slow
def test_recall_of_minhash_is_its_formula() -> None:
    """Pairs of documents with known Jaccard similarity share a key as often as 1 - (1 - s^8)^14."""
    pytest.importorskip("rensa")
    pytest.importorskip("xxhash")
    num_pairs, num_words, random = 20_000, 400, np.random.default_rng(1)
    for shared in (300, 356):  # of 400 words: similarity 0.6 and 0.80
        found = 0
        for _ in range(0, num_pairs, 1000):
            words = random.integers(0, 1 << 40, (1000, 2 * num_words - shared)).tolist()
            first = [" ".join(map(str, row[:num_words])) for row in words]
            second = [" ".join(map(str, row[num_words - shared :])) for row in words]
            keys = [band_keys(texts, 1, 14, 8)[0].reshape(1000, 14, 2) for texts in (first, second)]
            found += int((keys[0] == keys[1]).all(2).any(1).sum())
        similarity = shared / (2 * num_words - shared)
        assert found / num_pairs == pytest.approx(1 - (1 - similarity**8) ** 14, abs=0.01)
