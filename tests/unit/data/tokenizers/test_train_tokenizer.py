"""tools/train_tokenizer.py: reproducible output, and one clear line for each mistake in its input."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from megalite.cli.datasets import train_tokenizer as main
from megalite.data.tokenizers.tokenizer import TokenizerFiles, build_tokenizer
from megalite.utils.commands import run_main

CORPUS_DIR = Path(__file__).parents[4] / "scripts" / "corpus"
CORPUS = CORPUS_DIR / "bible.jsonl.gz"
TRICKY = "  two  spaces\ta tab\r\na line\n\n\nmany; 1234567890, 中文, 🙂, é, \u2028, \x00 end "


def run(*args: str | Path) -> None:
    run_main(main, [str(arg) for arg in args])


@pytest.fixture(scope="module")
def lines() -> list[str]:
    with gzip.open(CORPUS, "rt", encoding="utf-8") as file:
        return [next(file) for _ in range(50)]


def test_training_again_gives_the_shipped_tokenizer(tmp_path: Path) -> None:
    run("--input", CORPUS, "--output", tmp_path / "tokenizer.json")
    again = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    shipped = json.loads((CORPUS_DIR / "tokenizer.json").read_text(encoding="utf-8"))
    # Not the bytes: the library's releases may write the same tokenizer in another form.
    assert again["model"]["vocab"] == shipped["model"]["vocab"]
    assert again["model"]["merges"] == shipped["model"]["merges"]


@pytest.mark.parametrize(("kind", "size"), [("bpe", 400), ("sentencepiece-bpe", 500)])
def test_two_trainings_write_the_same_bytes_plain_and_gzipped(
    tmp_path: Path, lines: list[str], kind: str, size: int
) -> None:
    plain, zipped = tmp_path / "part.jsonl", tmp_path / "part.jsonl.gz"
    plain.write_text("".join(lines), encoding="utf-8")
    zipped.write_bytes(gzip.compress("".join(lines + lines).encode()))
    run("--input", plain, "--output", tmp_path / "1", "--vocab-size", str(size), "--type", kind)
    more = ("--max-documents", str(len(lines)))
    run("--input", zipped, "--output", tmp_path / "2", "--vocab-size", str(size), "--type", kind, *more)
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


@pytest.mark.parametrize(
    ("kind", "name"),
    [("bpe", "t.json"), ("sentencepiece-bpe", "t.model"), ("sentencepiece-unigram", "t.model")],
)
def test_what_is_trained_is_read_by_preprocessing_and_loses_no_text(
    tmp_path: Path, lines: list[str], kind: str, name: str
) -> None:
    source = tmp_path / "part.jsonl"
    source.write_text("".join(lines), encoding="utf-8")
    run("--input", source, "--output", tmp_path / name, "--vocab-size", "500", "--type", kind)
    tokenizer = build_tokenizer(None, TokenizerFiles(tokenizer_model=str(tmp_path / name)))
    assert tokenizer.vocab_size == 500
    for text in (TRICKY, json.loads(lines[0])["text"]):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    trained = len(tokenizer.encode(json.loads(lines[0])["text"]))
    assert trained < 0.6 * len(json.loads(lines[0])["text"].encode())
    assert tokenizer.eod < 500


@pytest.mark.parametrize(
    ("content", "options", "complaint"),
    [
        (b'{"text": "a"}\nplain\n', (), "in.jsonl:2: not valid JSON"),
        (b'{"body": "a"}\n', (), "in.jsonl:1: no key 'text' (it has 'body')"),
        (b'{"text": "abc abc"}\n', ("--vocab-size", "2048"), "yields only 260 of --vocab-size 2048"),
        (b'{"text": "abc"}\n', ("--vocab-size", "100"), "--vocab-size 100 is below 257"),
        (b'{"text": "\xff"}\n', (), "in.jsonl:1: not valid JSON"),
        (b'{"text": "abc abc"}\n', ("--type", "sentencepiece-bpe"), "cannot train --vocab-size 2048"),
        (b'{"text": "abc abc"}\n', ("--type", "sentencepiece-unigram"), "cannot train --vocab-size 2048"),
        (b"", ("--type", "sentencepiece-bpe"), "cannot train --vocab-size 2048"),
        (b"", ("--kind", "bpe"), "unknown flag --kind (see --help)"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    content: bytes,
    options: tuple[str, ...],
    complaint: str,
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.json"
    source.write_bytes(content)
    with pytest.raises(SystemExit, match="1"):
        run("--input", source, "--output", output, *options)
    said = capfd.readouterr().err
    assert complaint in said
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == [source]


def test_a_short_text_gets_a_small_vocabulary_by_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "my_text.txt", tmp_path / "tokenizer.json"
    source.write_text("abc abc")
    run("--input", source, "--output", output)
    assert capsys.readouterr().out == f"wrote {output}: 260 tokens\n"


def test_a_truncated_gzip_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.jsonl.gz"
    source.write_bytes(CORPUS.read_bytes()[:100_000])
    with pytest.raises(SystemExit, match="1"):
        run("--input", source, "--output", tmp_path / "out.json")
    said = capsys.readouterr().err
    assert f"cannot read {source}: " in said
    assert said.count("\n") == 1


def test_an_existing_tokenizer_is_kept_without_overwrite(
    tmp_path: Path, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = tmp_path / "part.jsonl", tmp_path / "out.json"
    source.write_text("".join(lines), encoding="utf-8")
    output.write_text("old")
    with pytest.raises(SystemExit, match="1"):
        run("--input", source, "--output", output, "--vocab-size", "300")
    assert "out.json exists: pass another --output, or --overwrite" in capsys.readouterr().err
    assert output.read_text() == "old"
    run("--input", source, "--output", output, "--vocab-size", "300", "--overwrite")
    assert build_tokenizer(None, TokenizerFiles(tokenizer_model=str(output))).vocab_size == 300
