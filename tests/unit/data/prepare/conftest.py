"""Small corpora, prepared in this process in many small pieces."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.prepare import passes, plan
from megalite.data.prepare.plan import PASSES, CorpusPlan, make_plan, read_corpus_job
from megalite.data.prepare.prepare import finish, run_pass, start
from megalite.data.preprocessing import encoder, input_plan
from megalite.data.sharded_dataset import open_dataset
from megalite.data.tokenizers.tokenizer import ByteTokenizer


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_plan, "_MIN_PIECE_BYTES", 90)
    monkeypatch.setattr(encoder, "_BATCH_RECORDS", 2)
    monkeypatch.setattr(plan, "_RANGE_BYTES", 100)
    monkeypatch.setattr(passes, "_BLOCK_KEYS", 5)
    monkeypatch.setattr(passes, "_BLOCK_TOKENS", 30)
    monkeypatch.setattr(passes, "_CHUNK_TOKENS", 20)


def write_texts(folder: Path, files: Sequence[Sequence[str]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, texts in enumerate(files):
        lines = (json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{number:03}.jsonl").write_text("".join(lines))


def plan_of(folder: Path, **settings: Any) -> CorpusPlan:
    """The plan of the corpus FOLDER/out/c from the files in FOLDER/in."""
    given = {
        **{"input": str(folder / "in"), "output": str(folder / "out" / "c"), "tokenizer": {"type": "byte"}},
        **settings,
    }
    path = folder / "corpus.yaml"
    path.write_text(json.dumps(given))  # JSON is YAML
    return make_plan(read_corpus_job(str(path)))


def run(plan: CorpusPlan, workers: int = 1) -> dict[str, Any]:
    assert start(plan, overwrite=False) is None
    for name in PASSES[:-1]:
        run_pass(plan, name, (0, 1), workers, lambda *_: None)
    return finish(plan)


def texts_of(folder: Path) -> list[str]:
    """The texts of the corpus in its order."""
    dataset: IndexedDataset = open_dataset(str(folder / "out" / "c"))
    return [ByteTokenizer().decode(dataset[i].tolist()) for i in range(len(dataset))]


def digests_of(folder: Path) -> dict[str, str]:
    """The digests of all files of the corpus."""
    files = sorted((folder / "out").iterdir())
    assert all(file.is_file() for file in files), "there are unfinished files"
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
