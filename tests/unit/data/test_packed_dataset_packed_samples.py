"""Microbatches of conversations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megalite.data.build_datasets import BuildOptions
from megalite.data.corpus_sources import sources_of_one_blend
from megalite.data.packed_dataset import PackedSamples, PackingOptions
from megalite.utils.errors import UserError
from tests.chat import write_masked
from tests.corpora import build_from_sources


def _samples(**changes: object) -> PackedSamples:
    values = {"seq_length": 8, "seed": 1, "vocab_size": 500, **changes}
    return PackedSamples(PackingOptions(**values))  # type: ignore[arg-type]


def test_conversations_of_a_sample_are_apart(tmp_path: Path) -> None:
    prefix = write_masked(str(tmp_path / "c"), [4, 4], first_answer=2)
    datasets = build_from_sources(
        sources_of_one_blend([prefix], "1,0,0"), (1, 0, 0), BuildOptions(_samples())
    )
    assert datasets.train is not None
    batch = _samples().read(datasets.train, np.arange(1))
    assert batch.position_ids is not None
    assert batch.document_ids is not None
    assert batch.loss_mask is not None
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 0, 1]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1, 1, 2, 2]]
    assert batch.loss_mask.tolist() == [[False, True, True, False, True, True, False, False]]
    assert sorted(batch.tokens[0].tolist()) == [0, 0, 0, 1, 2, 4, 5, 6]
    assert (batch.labels - batch.tokens)[0].tolist() == [1, 1, 1, 1, 1, 1, 0, 0]


def test_a_sample_of_one_conversation_has_no_documents(tmp_path: Path) -> None:
    prefix = write_masked(str(tmp_path / "c"), [4, 4])
    samples = _samples(packs=False)
    assert not samples.on_every_stage
    datasets = build_from_sources(sources_of_one_blend([prefix], "1,0,0"), (2, 0, 0), BuildOptions(samples))
    assert datasets.train is not None
    batch = samples.read(datasets.train, np.arange(2))
    assert batch.position_ids is None
    assert batch.document_ids is None
    assert batch.loss_mask is not None
    assert batch.loss_mask.sum(1).tolist() == [3, 3]


def test_splits_have_whole_conversations_and_are_evaluated_once(tmp_path: Path) -> None:
    """Of twenty conversations, two are to validate on; an evaluation of four samples is half empty."""
    prefix = write_masked(str(tmp_path / "c"), [6] * 20)
    samples = _samples()
    options = BuildOptions(samples, batch_size=2)
    datasets = build_from_sources(sources_of_one_blend([prefix], "80,10,10"), (40, 12, 4), options)
    assert datasets.train is not None
    assert datasets.valid is not None
    assert len(datasets.train) == 40
    assert [len(datasets.valid), datasets.test and len(datasets.test)] == [2, 2]
    batch = samples.read(datasets.valid, np.arange(4))
    assert batch.loss_mask is not None
    assert batch.loss_mask.sum(1).tolist() == [5, 5, 0, 0]
    assert batch.is_real is not None
    assert batch.is_real.sum(1).tolist() == [5, 5, 0, 0]
    trained = samples.read(datasets.train, np.arange(16)).tokens[:, 0]
    assert sorted(trained.tolist()) == list(range(0, 96, 6))
    assert sorted(batch.tokens[:2, 0].tolist()) == [96, 102]


def test_a_blend_of_conversations_is_evaluated_once(tmp_path: Path) -> None:
    prefixes = [write_masked(str(tmp_path / name), [6] * 10) for name in "ab"]
    words = ["0.5", prefixes[0], "0.5", prefixes[1]]
    samples = _samples()
    datasets = build_from_sources(sources_of_one_blend(words, "80,20,0"), (8, 10, 0), BuildOptions(samples))
    assert datasets.valid is not None
    batch = samples.read(datasets.valid, np.arange(10))
    assert batch.loss_mask is not None
    assert int((batch.loss_mask.sum(1) > 0).sum()) == 4


def test_too_few_conversations_for_a_batch(tmp_path: Path) -> None:
    prefix = write_masked(str(tmp_path / "c"), [6] * 3)
    options = BuildOptions(_samples(packs=False), batch_size=4)
    with pytest.raises(UserError, match="there are 3 samples of 8 tokens to train on, fewer than one batch"):
        build_from_sources(sources_of_one_blend([prefix], "1,0,0"), (4, 0, 0), options)


@pytest.mark.parametrize("packs", [True, False])
def test_mock_conversations(packs: bool) -> None:
    samples = _samples(packs=packs, seq_length=32)
    rows = samples.mock(20, 0)
    assert len(rows) == 20
    batch, other = samples.read(rows, np.arange(20)), samples.read(samples.mock(20, 1), np.arange(20))
    assert batch.loss_mask is not None
    counts = batch.loss_mask.sum(1)
    assert 0 < int(counts.min()) < int(counts.max()) < 32
    assert not batch.tokens.equal(other.tokens)
    assert batch.tokens.equal(samples.read(samples.mock(20, 0), np.arange(20)).tokens)
