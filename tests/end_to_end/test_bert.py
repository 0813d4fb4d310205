"""BERT from a corpus of sentences to transformers, as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megalite.data.indexed_dataset import IndexedWriter
from tests.programs import run_program, run_program_on_ranks

WORDS = [*("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), *(f"word{i}" for i in range(40)), "##s", "##ed"]
FLAGS = (
    *("--preset", "bert-tiny", "--seq-length", "24", "--global-batch-size", "4", "--micro-batch-size", "2"),
    *("--log-interval", "1", "--eval-iters", "1", "--eval-interval", "2", "--lr", "1e-3"),
    *("--layout", "manual"),
)


@pytest.fixture
def corpus_flags(tmp_path: Path) -> tuple[str, ...]:
    """Forty documents of a few sentences, and their vocabulary."""
    (tmp_path / "vocab.txt").write_text("".join(f"{word}\n" for word in WORDS))
    generator = np.random.default_rng(1)
    with IndexedWriter(str(tmp_path / "corpus"), np.uint16) as writer:
        for _ in range(40):
            lengths = generator.integers(3, 12, size=4)
            writer.add_document([generator.integers(5, len(WORDS), length).tolist() for length in lengths])
    return (
        *("--data-path", str(tmp_path / "corpus"), "--split", "80,10,10"),
        *("--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(tmp_path / "vocab.txt")),
    )


def test_random_sentences_on_two_ranks(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    flags = ("--mock-data", "--vocab-size", "50", "--train-iters", "2", "--metrics-file", metrics)
    line = (*FLAGS, *flags, "--tp", "2", "--sequence-parallel")
    first, done = run_program_on_ranks("pretrain_bert.py", line, line)
    assert (first.returncode, done.returncode) == (0, 0), first.stderr + done.stderr
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    trained = [row for row in rows if "lm_loss" in row]
    evaluated = [row["validation"] for row in rows if "validation" in row]
    assert len(trained) == len(evaluated) == 2
    for row in (*trained, *evaluated):
        assert abs(row["lm_loss"] - np.log(50)) < 0.5
        assert abs(row["sop_loss"] - np.log(2)) < 0.5
    assert f"| lm loss: {trained[0]['lm_loss']:.6E} | sop loss: {trained[0]['sop_loss']:.6E} |" in done.stdout
    assert f"sop loss value: {evaluated[0]['sop_loss']:.6E} |" in done.stdout


def test_from_a_corpus_to_transformers(corpus_flags: tuple[str, ...], tmp_path: Path) -> None:
    """A run that stops and resumes is the run that does not, and transformers reads it."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    common = (*FLAGS, *corpus_flags, "--lr-decay-iters", "4")
    outputs = []
    for iterations, folder in ((4, whole), (2, parts), (4, parts)):
        saving = ("--save", folder, "--load", folder, "--metrics-file", folder / "metrics.jsonl")
        done = run_program("pretrain_bert.py", *common, *saving, "--train-iters", iterations)
        assert done.returncode == 0, done.stderr
        outputs.append([json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()])
    final = [
        [row["lm_loss"] for row in rows if row.get("iteration") == 4] for rows in (outputs[0], outputs[2])
    ]
    assert final[0] == final[1] != []

    (at_end,) = [
        row["validation"]
        for row in outputs[0]
        if row.get("validation", {}).get("split") == "valid" and row["validation"]["iteration"] == 4
    ]
    done = run_program("tools/evaluate.py", "--load", whole, "--split", "valid", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["loss"], found["sop_loss"]) == (at_end["lm_loss"], at_end["sop_loss"])
    for tool, *flags in (("generate", "--prompt", "word1"), ("evaluate", "--text", "README.md")):
        done = run_program(f"tools/{tool}.py", "--load", whole, *flags)
        assert done.returncode == 1
        assert "holds a bert: evaluate it with tools/evaluate.py --split" in done.stderr

    done = run_program("tools/convert_checkpoint.py", "--load", whole, "--save", tmp_path / "hf")
    assert done.returncode == 0, done.stderr
    from transformers import AutoTokenizer, BertForPreTraining

    model = BertForPreTraining.from_pretrained(tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = tokenizer("Word1 word2s", return_tensors="pt")
    assert ids["input_ids"].tolist() == [[2, 6, 7, 45, 3]]
    assert model(**ids).prediction_logits.isfinite().all()
    done = run_program("tools/convert_checkpoint.py", "--load", tmp_path / "hf", "--save", tmp_path / "ours")
    assert done.returncode == 0, done.stderr
    flags = ("--train-iters", "1", "--load", tmp_path / "ours", "--finetune")
    done = run_program("pretrain_bert.py", *FLAGS, *corpus_flags, *flags)
    assert done.returncode == 0, done.stderr
