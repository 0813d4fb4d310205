"""The corpus that ships with the repository: its documents, and the tokenizer trained on them."""

from __future__ import annotations

import gzip
import json
import re
import unicodedata
from pathlib import Path

import pytest
from tokenizers import Tokenizer

CORPUS_DIR = Path(__file__).parents[3] / "scripts" / "corpus"
NUM_CHAPTERS = 1189


@pytest.fixture(scope="module")
def documents() -> list[str]:
    with gzip.open(CORPUS_DIR / "bible.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    assert all(row.keys() == {"text"} for row in rows)
    return [row["text"] for row in rows]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(CORPUS_DIR / "tokenizer.json"))


def test_every_chapter_is_one_document_of_its_own(documents: list[str]) -> None:
    assert len(documents) == len(set(documents)) == NUM_CHAPTERS
    assert 3_000_000 < sum(len(text.encode()) for text in documents) < 5_000_000


def test_repository_stays_small() -> None:
    assert (CORPUS_DIR / "bible.jsonl.gz").stat().st_size < 1_500_000


@pytest.mark.parametrize(
    ("residue", "pattern"),
    [
        ("markup", r"[<>&{}\[\]|\\]"),
        (
            "a control character or a foreign space",
            r"[^\S \n]|[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\ufeff\ufffd]",
        ),
        ("a verse or footnote number", r"\d"),
        ("a blank line or doubled space", r"\n\n|  |^\s|\s$| \n|\n "),
        ("a space before punctuation", r" [,.;:!?”]"),
        ("words joined where a footnote was", r"[a-z][A-Z]|[,.;:!?”]\w"),
        ("the glossary or an introduction", r"World English Bible|Deuterocanon|Septuagint"),
    ],
)
def test_no_document_carries(documents: list[str], residue: str, pattern: str) -> None:
    compiled = re.compile(pattern)
    found = [
        text[max(0, match.start() - 20) : match.end() + 20]
        for text in documents
        for match in compiled.finditer(text)
    ]
    assert not found, f"{residue}, {len(found)} times: {found[:3]}"


def test_documents_are_nfc(documents: list[str]) -> None:
    assert all(unicodedata.is_normalized("NFC", text) for text in documents)


@pytest.mark.parametrize(
    "known_text",
    [
        "In the beginning, God created the heavens and the earth. The earth was formless and empty.",
        "Yahweh is my shepherd;\nI shall lack nothing.",
        "Jesus wept.",
        "The grace of the Lord Jesus Christ be with all the saints. Amen.",
    ],
)
def test_known_verses_are_whole(documents: list[str], known_text: str) -> None:
    assert sum(known_text in text for text in documents) == 1


def test_tokenizer_restores_every_document(documents: list[str], tokenizer: Tokenizer) -> None:
    encodings = tokenizer.encode_batch(documents)
    assert [tokenizer.decode(encoding.ids) for encoding in encodings] == documents


@pytest.mark.parametrize("text", ["日本語, naïve café", "\t\x00 tabs\r\n", "😀", "", "  two  spaces  "])
def test_tokenizer_restores_text_unlike_the_corpus(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_tokenizer_has_an_end_of_document_token_and_no_unused_id(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_to_id("<|endoftext|>") == 0
    assert tokenizer.get_vocab_size() == 2048
    assert sorted(tokenizer.get_vocab().values()) == list(range(2048))
