"""Training on documents that are packed into samples."""

from __future__ import annotations

import json
from pathlib import Path

from megalite.data.indexed_dataset import IndexedWriter
from tests.end_to_end.conftest import RunHere

OPTIONS = ("--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss")
EOD = 256


def write(prefix: Path, *end: int) -> str:
    """A corpus of 60 short documents of bytes, each with these tokens at its end."""
    with IndexedWriter(str(prefix), "uint16") as writer:
        for i in range(60):
            writer.add_document([[*f"document {i}".encode(), *end]])
    return str(prefix)


def test_each_option_changes_training_and_validation(pretrain_here: RunHere, tmp_path: Path) -> None:
    corpus = write(tmp_path / "corpus", EOD)

    def losses(*flags: str) -> tuple[float, float]:
        path = tmp_path / f"metrics {flags}"
        run = ("--data-path", corpus, "--train-iters", "1", "--eval-interval", "1", "--lr", "0")
        status, lines = pretrain_here(*run, "--metrics-file", str(path), *flags)
        assert status == 0, lines
        records = [json.loads(line) for line in path.read_text().splitlines()]
        (train,) = (each["lm_loss"] for each in records if "lm_loss" in each)
        return train, next(each["validation"]["lm_loss"] for each in records if "validation" in each)

    runs = [losses(), *(losses(option) for option in OPTIONS), losses(*OPTIONS)]
    for values in zip(*runs, strict=True):
        assert len(set(values)) == len(runs)


def test_a_corpus_that_marks_no_ends_is_one_line(pretrain_here: RunHere, tmp_path: Path) -> None:
    corpus = write(tmp_path / "corpus")
    assert pretrain_here("--data-path", corpus, "--train-iters", "1")[0] == 0
    status, lines = pretrain_here("--data-path", corpus, "--train-iters", "1", "--reset-attention-mask")
    assert status == 1
    (error,) = (line for line in lines if line.startswith("error: "))
    assert f"no document of {corpus} ends with the tokenizer's end-of-document token 256" in error
    assert "--append-eod" in error
