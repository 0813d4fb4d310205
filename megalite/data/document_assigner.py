"""Assign the documents of each sample to the context-parallel ranks, and keep the tokens of one of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.batch.document_assignment import assign_documents
from megalite.batch.microbatch import Microbatch
from megalite.data.samples import Samples
from megalite.distributed.held_positions import HeldPositions


@dataclass(frozen=True)
class DocumentAssigner:
    """Assignment of a rank's tokens of whole samples, on the host, which must know the assignments.

    Attributes:
        samples: mark the documents of a microbatch.
        positions: the rank among those that hold different tokens of the same samples.
        num_later: number of later tokens to predict besides the next one.
    """

    samples: Samples
    positions: HeldPositions
    num_later: int

    def __call__(self, microbatch: Microbatch, sequences_per_sample: int = 1) -> Microbatch:
        """Return the rank's tokens of a microbatch that was read, with all fields of a microbatch.

        Args:
            sequences_per_sample: into how many sequences each sample is cut.
        """
        whole = self.samples.marked(microbatch).in_sequences(sequences_per_sample)
        whole = whole.with_later_tokens(self.num_later)
        assert whole.document_ids is not None, "samples have no documents to assign"
        lengths = map(document_lengths, whole.document_ids)
        assignments = tuple(assign_documents(each, self.positions.count) for each in lengths)
        return whole.of_rank(assignments, self.positions.index)


def own_tokens_of(whole: Microbatch, positions: HeldPositions) -> Microbatch:
    """Return a rank's tokens of a microbatch of whole samples, each of which is one document."""
    length = whole.tokens.shape[1]
    if not positions.assigns_documents:
        return whole.cut(positions.runs(length // positions.count))
    assignment = assign_documents([length], positions.count)
    return whole.of_rank((assignment,) * len(whole.tokens), positions.index)


def document_lengths(document_ids: Tensor) -> list[int]:
    """Return the number of tokens of each document of a sample: of each run of equal ids, int64 ``[s]``."""
    lengths: list[int] = torch.unique_consecutive(document_ids, return_counts=True)[1].tolist()
    return lengths
