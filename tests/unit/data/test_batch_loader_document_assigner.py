"""A rank's tokens of assigned documents keep their labels, positions and losses."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from megalite.data.batch_loader import DocumentAssigner, document_lengths
from megalite.data.samples import DocumentEnds, GPTSamples, MockDataset, random_tokens
from megalite.distributed.axis import HeldPositions

EOD, S = 9, 48


@pytest.mark.parametrize("resets_positions", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_tokens_keep_what_belongs_to_them(num_ranks: int, resets_positions: bool) -> None:
    ends = DocumentEnds(EOD, resets_positions, True, True, True)
    samples = GPTSamples(S, seed=1, vocab_size=EOD + 1, ends=ends)
    read = samples.read(
        MockDataset(4, 1, 0, partial(random_tokens, seq_length=S, vocab_size=EOD + 1, eod=EOD)),
        np.arange(2, 4),
    )
    whole = samples.marked(read).with_later_tokens(2)
    seen = torch.zeros_like(whole.tokens)
    for rank in range(num_ranks):
        own = DocumentAssigner(samples, HeldPositions(rank, num_ranks, assigns_documents=True), 2)(read)
        assert own.assignments is not None and own.position_ids is not None
        assert own.document_ids is not None and own.document_ids.equal(whole.document_ids)
        for i, assignment in enumerate(own.assignments):
            positions = torch.tensor(assignment.positions_of(rank))
            seen[i, positions] += 1
            for name in ("tokens", "labels", "loss_mask", "later_tokens", "later_labels", "later_mask"):
                assert getattr(own, name)[i].equal(getattr(whole, name)[i][..., positions]), name
            expected = positions if whole.position_ids is None else whole.position_ids[i, positions]
            assert own.position_ids[i].equal(expected)
    assert bool((seen == 1).all())


def test_lengths_are_those_of_runs_of_equal_ids() -> None:
    assert document_lengths(torch.tensor([0, 0, 1, 2, 2, 2, 0])) == [2, 1, 3, 1]
