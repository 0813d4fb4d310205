"""Training with fill-in-the-middle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megalite.data.indexed_dataset import IndexedWriter
from tests.end_to_end.conftest import RunHere


def test_it_changes_training_and_leaves_validation(pretrain_here: RunHere, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    names = ["<|endoftext|>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>"]
    model = tokenizers.ByteLevelBPETokenizer()
    model.train_from_iterator(["some text"] * 9, vocab_size=270, special_tokens=names, show_progress=False)
    model.save(str(tmp_path / "t.json"))
    prefix = str(tmp_path / "corpus")
    with IndexedWriter(prefix, "uint16") as writer:
        for i in range(40):
            writer.add_document([[*model.encode(f"document {i} of some text").ids, 0]])

    def figures(name: str, *flags: str) -> tuple[list[float], list[float]]:
        path = tmp_path / name
        tokenizer = (
            "--tokenizer-type",
            "HuggingFaceTokenizer",
            "--tokenizer-model",
            str(tmp_path / "t.json"),
        )
        run = ("--data-path", prefix, "--train-iters", "2", "--eval-interval", "1", "--lr", "0")
        status, lines = pretrain_here(*run, *tokenizer, "--metrics-file", str(path), *flags)
        assert status == 0, lines
        records = [json.loads(line) for line in path.read_text().splitlines()]
        train = [each["lm_loss"] for each in records if "lm_loss" in each]
        return train, [each["validation"]["lm_loss"] for each in records if "validation" in each]

    plain, turned, again = figures("0"), figures("1", "--fim-rate", "1"), figures("2", "--fim-rate", "1")
    assert turned == again
    assert all(one != other for one, other in zip(plain[0], turned[0], strict=True))
    assert plain[1] == turned[1]
