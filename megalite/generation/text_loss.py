"""The loss of text under a trained model.

Shapes: b windows of a batch, s tokens of a window.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from megalite.data.batch import HostBatch
from megalite.data.document_ends import DocumentEnds
from megalite.generation.windows import Window
from megalite.model.documents import Documents
from megalite.model.stage import GPTStage
from megalite.parallel.collectives import all_reduce
from megalite.topology import Topology


@dataclass(frozen=True)
class TextLoss:
    """What a text came to.

    Attributes:
        total: sum of the tokens' losses, in nats.
        num_tokens: that were predicted.
        num_bytes: of the text in UTF-8; None where it is known in tokens alone.
    """

    total: float
    num_tokens: int
    num_bytes: int | None = None

    @property
    def mean(self) -> float:
        """Loss a token."""
        return self.total / self.num_tokens

    @property
    def bits_per_byte(self) -> float | None:
        """What does not depend on the tokenizer, so that models can be compared."""
        return self.total / math.log(2.0) / self.num_bytes if self.num_bytes else None


@dataclass(frozen=True)
class LossMeter:
    """Measures the loss of windows with one model; every rank calls it with the same.

    Args:
        stage: a whole model.
        ends: what happens at the ends of documents, as in training; None where samples are taken whole.
        batch_size: windows that are run together on a replica.
    """

    stage: GPTStage
    topology: Topology
    ends: DocumentEnds | None
    batch_size: int

    @torch.inference_mode()
    def __call__(self, windows: Iterable[Window]) -> TextLoss:
        """Sums over the windows' counted tokens, which data-parallel replicas share batch by batch."""
        dp, device = self.topology.dp, self.topology.device
        sums = torch.zeros(2, dtype=torch.float64, device=device)  # losses and tokens
        for number, batch in enumerate(_batches(windows, self.batch_size)):
            if number % dp.size == dp.rank:
                sums += self._sums(batch)
        total, num_tokens = all_reduce(sums, dp).tolist()
        return TextLoss(total, int(num_tokens))

    def _sums(self, batch: list[Window]) -> torch.Tensor:
        """Loss and number of a batch's counted tokens, ``[2]``."""
        text = torch.from_numpy(np.stack([window.text for window in batch]))
        microbatch = HostBatch(text, torch.zeros(len(batch), dtype=torch.int64)).to(self.topology.device)
        if self.ends is not None:
            microbatch = self.ends.marked(microbatch)
        counts = torch.zeros(microbatch.labels.shape, dtype=torch.bool)
        for row, window in enumerate(batch):
            counts[row, window.counted] = True
        counts = counts.to(self.topology.device)
        if microbatch.loss_mask is not None:
            counts &= microbatch.loss_mask
        documents = Documents(microbatch.position_ids, microbatch.document_ids, counts)
        loss = self.stage(microbatch.tokens, microbatch.labels, microbatch.sample_numbers, None, documents)
        return torch.stack((loss.double(), counts.sum().double()))


def _batches(windows: Iterable[Window], size: int) -> Iterator[list[Window]]:
    iterator = iter(windows)
    while batch := list(itertools.islice(iterator, size)):
        yield batch
