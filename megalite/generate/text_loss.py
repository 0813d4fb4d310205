"""Compute the loss of a model on text, in windows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from megalite.data.document_ends import DocumentEnds
from megalite.distributed.collectives import all_reduce
from megalite.distributed.topology import Topology
from megalite.generate.stage_chain import broadcast_from_last, run_in_order
from megalite.log import LineInterval, log
from megalite.loss_terms import LM_LOSS, WithTerms
from megalite.microbatch import Microbatch
from megalite.model.transformer_stage import TransformerStage


class Window(NamedTuple):
    """Holds the tokens that the model reads as one sequence.

    Attributes:
        text: int64 ``[s + 1]``. The inputs are all tokens except the last, the labels all except the first.
            The end of a stream is padded with zeros.
        counted: labels whose loss counts; labels before them are context, and count in an earlier window.
    """

    text: npt.NDArray[np.int64]
    counted: slice


def windows(pieces: Iterable[npt.NDArray[Any]], seq_length: int, stride: int) -> Iterator[Window]:
    """Yield windows over a stream of tokens, with only a part of the stream in memory.

    Every token except the first is counted once.

    Args:
        pieces: the stream, in pieces of any length.
        seq_length: s.
        stride: tokens from the start of one window to the next, at most s. A token has at least s - stride
            tokens of context, if the stream has them.
    """
    assert 0 < stride <= seq_length
    buffer = np.empty(0, np.int64)
    num_counted = 0  # labels at the start of the buffer that are already counted
    for piece in pieces:
        buffer = np.concatenate((buffer, piece))
        first = 0
        while len(buffer) - first > seq_length:
            yield Window(buffer[first : first + seq_length + 1], slice(num_counted, seq_length))
            num_counted = seq_length - stride
            first += stride
        buffer = buffer[first:]
    num_labels = len(buffer) - 1
    if num_labels > num_counted:
        text = np.zeros(seq_length + 1, np.int64)
        text[: len(buffer)] = buffer
        yield Window(text, slice(num_counted, num_labels))


@dataclass(frozen=True)
class TextLoss:
    """Holds the loss of a text.

    Attributes:
        total: sum of the tokens' losses, in nats.
        num_tokens: number of predicted tokens.
        num_bytes: size of the text in UTF-8; None if only its tokens are known.
    """

    total: float
    num_tokens: int
    num_bytes: int | None = None

    @property
    def mean(self) -> float:
        """Return the loss per token."""
        return self.total / self.num_tokens

    @property
    def bits_per_byte(self) -> float | None:
        """Return the loss in bits per byte, which compares models with different tokenizers."""
        return self.total / math.log(2.0) / self.num_bytes if self.num_bytes else None


@dataclass(frozen=True)
class LossMeter:
    """Computes the loss of windows with one model. Every rank must pass the same windows.

    Args:
        stage: this rank's stage of the model.
        ends: treatment of document ends, as in training; None to ignore them.
        batch_size: windows per batch of a replica.
    """

    stage: TransformerStage
    topology: Topology
    ends: DocumentEnds | None
    batch_size: int

    @torch.inference_mode()
    def __call__(self, windows: Iterable[Window]) -> TextLoss:
        """Return the loss of the counted tokens; batches are distributed over data-parallel replicas."""
        ranks, device = self.topology.sample_ranks, self.topology.device
        sums = torch.zeros(2, dtype=torch.float64, device=device)  # losses and tokens
        interval, num_windows = LineInterval(), 0
        for number, batch in enumerate(_batches(windows, self.batch_size)):
            if number % ranks.size == ranks.rank:
                sums += self._sums(batch)
            num_windows += len(batch)
            if interval.is_over():
                log.info("evaluated %s windows", f"{num_windows:,}")
        sums = broadcast_from_last(all_reduce(sums, self.topology.loss_ranks), self.stage)
        total, num_tokens = sums.tolist()
        return TextLoss(total, int(num_tokens))

    def _sums(self, batch: list[Window]) -> torch.Tensor:
        """Return the summed loss and the number of the counted tokens of a batch, ``[2]``.

        Stages before the last return zeros.
        """
        text = torch.from_numpy(np.stack([window.text for window in batch]))
        sample_numbers = torch.zeros(len(batch), dtype=torch.int64)
        microbatch = Microbatch.of(text, sample_numbers).to(self.topology.device)
        if self.ends is not None:
            microbatch = self.ends.marked(microbatch)
        counts = torch.zeros(microbatch.labels.shape, dtype=torch.bool)
        for row, window in enumerate(batch):
            counts[row, window.counted] = True
        counts = counts.to(self.topology.device)
        if microbatch.loss_mask is not None:
            counts &= microbatch.loss_mask
        own = self.topology.positions
        runs = own.runs(counts.shape[1] // own.count)
        microbatch = replace(microbatch, loss_mask=counts).cut(runs)
        loss = run_in_order(self.stage, microbatch, self._output)
        if not self.stage.is_last:
            return torch.zeros(2, dtype=torch.float64, device=counts.device)
        assert microbatch.loss_mask is not None
        return torch.stack((loss.double(), microbatch.loss_mask.sum().double()))

    def _output(self, microbatch: Microbatch, hidden: torch.Tensor | None) -> torch.Tensor:
        """Return what the next stage reads; on the last stage, the summed loss of the predicted tokens."""
        if not self.stage.is_last:
            return self.stage.hidden_states(microbatch, hidden)
        return WithTerms.of_last(self.stage(microbatch, hidden)).terms[LM_LOSS].total


def _batches(windows: Iterable[Window], size: int) -> Iterator[list[Window]]:
    iterator = iter(windows)
    while batch := list(itertools.islice(iterator, size)):
        yield batch
