"""What preprocessing writes besides documents: sentences, reports, parts, and nothing when it cannot."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megalite.cli.preprocess import _run as run_preprocessing
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.preprocessing import input_plan as plan_module
from megalite.data.preprocessing.input_plan import PreprocessJob
from megalite.data.preprocessing.preprocess import preprocess
from megalite.data.preprocessing.shards import copy_range
from megalite.data.tokenizers.tokenizer import ByteTokenizer, TokenizerFiles
from megalite.utils.errors import UserError

ROOT = Path(__file__).parents[4]


def jsonl(path: Path, *documents: object) -> str:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return str(path)


def test_sentences(tmp_path: Path) -> None:
    pytest.importorskip("sentencex")
    path = jsonl(
        tmp_path / "a.jsonl", {"text": "Dr. Smith left. He ran!\n\nWhy?"}, {"text": " "}, {"text": "End."}
    )
    preprocess(PreprocessJob((path,), str(tmp_path / "o"), "byte", sentence_language="en", append_eod=True))
    dataset, tokenizer = IndexedDataset(tmp_path / "o_text_sentence"), ByteTokenizer()
    assert [tokenizer.decode(dataset[i].tolist()) for i in range(4)] == [
        "Dr. Smith left.", "He ran!", "Why?", "End.",
    ]  # fmt: skip
    assert dataset.document_index.tolist() == [0, 3, 4]
    assert [int(dataset[i][-1]) == 256 for i in range(4)] == [False, False, True, True]


def test_nested_keys(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"a": {"b": "deep"}, "c.d": "flat"}, {"a": "x", "c.d": "y"})
    job = PreprocessJob((path,), str(tmp_path / "o"), "byte", json_keys=("a.b", "c.d"), skip_bad_records=True)
    assert preprocess(job).progress.num_skipped == 1
    for key, text in (("a.b", b"deep"), ("c.d", b"flat")):
        assert bytes(IndexedDataset(job.prefix(key)).tokens.tolist()) == text


def test_report(tmp_path: Path) -> None:
    texts = ["ab", "ü" * 4, "abcdefg", "x"]
    path = jsonl(tmp_path / "a.jsonl", *({"text": text} for text in texts))
    (report,) = preprocess(PreprocessJob((path,), str(tmp_path / "o"), "byte", append_eod=True)).reports
    on_disk = json.loads((tmp_path / "o_text_document.json").read_text())
    assert on_disk["num_documents"] == report.num_documents == 4
    assert (report.num_tokens, report.num_text_bytes) == (18 + 4, 18)
    assert report.bytes_per_token == 18 / 22
    assert {name: count for name, count in report.length_histogram.items() if count} == {
        "2-3": 2, "8-15": 2,
    }  # fmt: skip
    for kind in ("bin", "idx"):
        digest = hashlib.sha256((tmp_path / f"o_text_document.{kind}").read_bytes()).hexdigest()
        assert on_disk["sha256"][kind] == digest
    assert "2-3 tokens" in "\n".join(report.lines())


@pytest.mark.parametrize("append_eod", [False, True])
def test_special_tokens_in_texts_are_counted_and_located(
    tmp_path: Path, append_eod: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "_MIN_PIECE_BYTES", 50)
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.ByteLevelBPETokenizer()
    specials = ["<|endoftext|>", "<|call|>"]
    model.train_from_iterator(["a b c"], vocab_size=260, special_tokens=specials, show_progress=False)
    model.save(str(tmp_path / "tokenizer.json"))
    plain = [{"text": text} for text in ("c", "", "<|endoftex|>") * 5]
    texts = ["a<|endoftext|>b", "<|call|>", "<|endoftext|>" * 2]
    path = jsonl(tmp_path / "a.jsonl", *plain, *({"text": text} for text in texts))
    for workers in "1", "2":
        prefix = tmp_path / f"o{workers}"
        flags = ["--input", path, "--output-prefix", str(prefix), "--workers", workers]
        flags += ["--tokenizer-model", str(tmp_path / "tokenizer.json"), *["--append-eod"] * append_eod]
        run_preprocessing(flags)
        report = json.loads((tmp_path / f"{prefix.name}_text_document.json").read_text())
        assert (report["num_special_in_texts"], report["num_ends_in_texts"]) == (3, 3)
        assert report["first_special_in_texts"] == f"<|endoftext|> in {path}, line 16"
        assert "3 documents with the text of a special token" in caplog.text
        assert f"in {path}, line 16); training ends a document at each of 3 end" in caplog.text
        caplog.clear()


def test_a_part_has_its_number_in_its_name(tmp_path: Path) -> None:
    paths = [jsonl(tmp_path / f"{i}.jsonl", {"text": str(i)}) for i in range(2)]
    for i in range(2):
        preprocess(PreprocessJob(tuple(paths), str(tmp_path / "o"), "byte", partition=(i, 2)))
        dataset = IndexedDataset(tmp_path / f"o-0000{i}-of-00002_text_document")
        assert bytes(dataset.tokens.tolist()).decode() == str(i)


def test_output_is_no_input(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", {"text": "x"})
    job = PreprocessJob((str(tmp_path),), str(tmp_path / "o"), "byte")
    first = preprocess(job).progress.num_documents
    again = PreprocessJob((str(tmp_path),), str(tmp_path / "p"), "byte")
    assert preprocess(again).progress.num_documents == first == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path: Path, workers: int) -> None:
    """A limit on the size of files acts like a full disk: writing fails in the same way."""
    path = jsonl(tmp_path / "a.jsonl", *({"text": "x" * 1000} for _ in range(300)))
    before = sorted(os.listdir(tmp_path))
    run = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", path, "--output-prefix",
         str(tmp_path / "o"), "--tokenizer-type", "byte", "--workers", str(workers)],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
    )  # fmt: skip
    assert (run.returncode, run.stdout) == (1, "")
    assert (
        run.stderr == f"error: cannot write {tmp_path}/o: File too large; the unfinished output is removed\n"
    )
    assert sorted(os.listdir(tmp_path)) == before


def test_a_vocabulary_over_the_type_is_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"text": "1 70000"})
    files = TokenizerFiles(vocab_size=70_001)
    preprocess(PreprocessJob((path,), str(tmp_path / "o"), "NullTokenizer", files))
    assert IndexedDataset(tmp_path / "o_text_document").tokens.tolist() == [1, 70_000]
    with pytest.raises(UserError, match="'70000' is not a token id"):
        preprocess(
            PreprocessJob((path,), str(tmp_path / "p"), "NullTokenizer", TokenizerFiles(vocab_size=7000))
        )


@pytest.mark.parametrize("support", ["works", "refuses", "is missing"])
def test_ranges_of_files_are_copied_however_the_system_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, support: str
) -> None:
    def refuse(*arguments: int) -> int:
        raise OSError(18, "Invalid cross-device link")

    if support == "refuses":
        monkeypatch.setattr(os, "copy_file_range", refuse, raising=False)
    elif support == "is missing":
        monkeypatch.delattr(os, "copy_file_range", raising=False)
    data = np.random.default_rng(0).bytes(3_000_000)
    (tmp_path / "from").write_bytes(data)
    with open(tmp_path / "from", "rb") as source, open(tmp_path / "to", "wb", buffering=0) as target:
        target.write(b"head")
        copy_range(source.fileno(), target.fileno(), 17, 2_500_000)
        copy_range(source.fileno(), target.fileno(), 0, 5)
    assert (tmp_path / "to").read_bytes() == b"head" + data[17 : 17 + 2_500_000] + data[:5]
