"""Ends of documents in samples: Megatron-core's positions, attention and loss masks, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalite.data.build_datasets import build_mock_datasets
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.microbatch import Microbatch
from megalite.data.samples import DocumentEnds, GPTSamples, check_ends
from megalite.utils.errors import UserError

EOD = 3
ALL = DocumentEnds(EOD, True, True, True, on_every_stage=True)


def microbatch(rows: list[list[int]]) -> Microbatch:
    tokens = torch.tensor(rows)
    return Microbatch(tokens, tokens, torch.arange(len(rows)))


def test_a_sample_by_hand() -> None:
    marked = ALL.marked(microbatch([[7, 3, 5, 5, 3, 3, 8], [3, 7, 7, 7, 7, 7, 3]]))
    assert marked.position_ids is not None and marked.document_ids is not None
    assert marked.loss_mask is not None
    assert marked.position_ids.tolist() == [[0, 1, 0, 1, 2, 0, 0], [0, 0, 1, 2, 3, 4, 5]]
    assert marked.document_ids.tolist() == [[0, 0, 1, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1]]
    assert marked.loss_mask.tolist() == [[1, 0, 1, 1, 0, 0, 1], [0, 1, 1, 1, 1, 1, 0]]


@pytest.mark.parametrize("option", ["position_ids", "document_ids", "loss_mask"])
def test_what_is_not_requested_is_missing(option: str) -> None:
    options = [name == option for name in ("position_ids", "document_ids", "loss_mask")]
    marked = DocumentEnds(EOD, *options, on_every_stage=False).marked(microbatch([[1, 3, 1]]))
    there = {
        name: getattr(marked, name) is not None for name in ("position_ids", "document_ids", "loss_mask")
    }
    assert there == {name: name == option for name in there}


@given(st.lists(st.integers(2, 5), min_size=1, max_size=40))
def test_megatron_core_finds_the_same(tokens: list[int]) -> None:
    theirs = pytest.importorskip(
        "megatron.core.datasets.gpt_dataset", reason="megatron-core is not installed"
    )
    hidden, counted, positions = theirs._get_ltor_masks_and_position_ids(
        torch.tensor(tokens), EOD, True, True, True, True
    )
    marked = ALL.marked(microbatch([tokens]))
    assert marked.position_ids is not None and marked.document_ids is not None
    assert marked.loss_mask is not None
    ids = marked.document_ids[0]
    seen = (ids[:, None] == ids).tril()
    assert torch.equal(seen, ~hidden[0])
    assert torch.equal(marked.position_ids[0], positions)
    assert torch.equal(marked.loss_mask[0], counted.bool())


def test_a_corpus_without_ends_is_refused(write_dataset: Any) -> None:
    corpus = IndexedDataset(write_dataset([5, 9, 2]))
    last = int(corpus[1][-1])
    check_ends(corpus, last)
    absent = 1 + max(int(corpus[i][-1]) for i in range(3))
    with pytest.raises(UserError, match=f"end-of-document token {absent}: preprocess it with --append-eod"):
        check_ends(corpus, absent)


def test_random_documents_end() -> None:
    plain = build_mock_datasets(GPTSamples(64, 1, 1000), (400, 0, 0)).train
    packed = build_mock_datasets(GPTSamples(64, 1, 1000, ALL), (400, 0, 0)).train
    assert plain is not None and packed is not None
    is_end = np.stack([packed[i] == EOD for i in range(400)])
    assert 3.5 < is_end.sum(1).mean() < 4.5
    assert all((packed[i][~is_end[i]] == plain[i][~is_end[i]]).all() for i in range(400))
