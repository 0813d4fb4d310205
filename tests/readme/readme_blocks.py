"""Check the output of scripts/quickstart.sh in runs/quickstart: loss, resume, checkpoint and generated text.

.ci/run runs this file after the quickstart. Pytest does not collect it by default because of its name.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.data.indexed_dataset import IndexedDataset
from tests.corpora import split_ranges

RUN = Path(__file__).parents[2] / "runs" / "quickstart"
SPLIT = "949,50,1"  # of scripts/examples/quickstart.yaml
VOCAB_SIZE = 2048


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RUN / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def validations(lines: list[dict[str, Any]]) -> dict[int, float]:
    found = [line["validation"] for line in lines if "validation" in line]
    return {each["iteration"]: each["lm_loss"] for each in found if each["split"] == "valid"}


def test_the_loss_fell(lines: list[dict[str, Any]]) -> None:
    losses = [line["lm_loss"] for line in lines if "iteration" in line]
    assert losses[-1] < losses[0] - 1.5
    assert losses == sorted(losses, reverse=True) or max(np.diff(losses)) < 0.2


def test_the_resumed_run_continued_from_the_checkpoint(lines: list[dict[str, Any]]) -> None:
    iterations = [line["iteration"] for line in lines if "iteration" in line]
    assert iterations == list(range(20, 301, 20))
    assert [line["consumed_samples"] for line in lines if "iteration" in line] == [16 * i for i in iterations]
    losses = {line["iteration"]: line["lm_loss"] for line in lines if "iteration" in line}
    assert abs(losses[220] - losses[200]) < 0.25


def test_it_beats_a_unigram_model(validations: dict[int, float]) -> None:
    """Compare with the cross-entropy of the validation documents under the training token frequencies."""
    dataset = IndexedDataset(str(RUN / "corpus_text_document"))
    train, valid, _ = split_ranges(SPLIT, len(dataset))
    assert train is not None
    assert valid is not None
    counts = sum(np.bincount(dataset[i], minlength=VOCAB_SIZE) for i in train) + 1.0  # add-one smoothing
    log_probabilities = np.log(counts / counts.sum())
    tokens = np.concatenate([dataset[i] for i in valid])
    unigram = float(-log_probabilities[tokens].mean())
    assert 5.5 < unigram < math.log(VOCAB_SIZE)
    assert validations[300] < unigram - 1.0


def test_tensorboard_files_and_checkpoint_exist() -> None:
    assert list((RUN / "tensorboard").glob("events.out.tfevents.*"))
    assert (RUN / "checkpoints" / "latest").read_text().strip() == "iter_0000300"
    assert len(list((RUN / "checkpoints" / "iter_0000300").glob("*.safetensors"))) == 4


def test_it_generated_text() -> None:
    text = (RUN / "text.txt").read_text()
    assert text.startswith("And God said")
    words = text.removeprefix("And God said").split()
    assert len(words) > 5
    corpus_words = sum(word.strip(".,;“”’").isalpha() for word in words)
    assert corpus_words > len(words) / 2
