"""scripts/train_tokenizer.py: reproducible output, and one clear line for each mistake in its input."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS_DIR = Path(__file__).parents[3] / "scripts"
CORPUS = SCRIPTS_DIR / "corpus" / "bible.jsonl.gz"


def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS_DIR / "train_tokenizer.py"), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_training_again_gives_the_shipped_tokenizer(tmp_path: Path) -> None:
    result = run("--input", CORPUS, "--output", tmp_path / "tokenizer.json")
    assert result.returncode == 0, result.stderr
    again = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    shipped = json.loads((SCRIPTS_DIR / "corpus" / "tokenizer.json").read_text(encoding="utf-8"))
    # Not the bytes: the library's releases may write the same tokenizer in another form.
    assert again["model"]["vocab"] == shipped["model"]["vocab"]
    assert again["model"]["merges"] == shipped["model"]["merges"]


def test_two_trainings_write_the_same_bytes_plain_and_gzipped(tmp_path: Path) -> None:
    with gzip.open(CORPUS, "rt", encoding="utf-8") as file:
        lines = [next(file) for _ in range(50)]
    plain, zipped = tmp_path / "part.jsonl", tmp_path / "part.jsonl.gz"
    plain.write_text("".join(lines), encoding="utf-8")
    zipped.write_bytes(gzip.compress("".join(lines).encode()))
    outputs = [tmp_path / "1.json", tmp_path / "2.json"]
    for source, output in zip((plain, zipped), outputs, strict=True):
        result = run("--input", source, "--output", output, "--vocab-size", "400")
        assert result.returncode == 0, result.stderr
    assert outputs[0].read_bytes() == outputs[1].read_bytes()


@pytest.mark.parametrize(
    ("content", "options", "complaint"),
    [
        (b'{"text": "a"}\nplain\n', (), "in.jsonl:2: not a line of JSON"),
        (b'{"body": "a"}\n', (), "in.jsonl:1: no string under the key 'text'"),
        (b'{"text": "abc abc"}\n', (), "yields only 260 of --vocab-size 2048"),
        (b'{"text": "abc"}\n', ("--vocab-size", "100"), "--vocab-size 100 is below 257"),
        (b'{"text": "\xff"}\n', (), "not UTF-8"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, content: bytes, options: tuple[str, ...], complaint: str
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.json"
    source.write_bytes(content)
    result = run("--input", source, "--output", output, *options)
    assert result.returncode == 1
    assert complaint in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert not output.exists()


def test_a_truncated_gzip_file_is_one_line(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl.gz"
    source.write_bytes(CORPUS.read_bytes()[:100_000])
    result = run("--input", source, "--output", tmp_path / "out.json")
    assert result.returncode == 1
    assert "damaged" in result.stderr
    assert result.stderr.count("\n") == 1
