"""Packed samples: conversations, of which only answers have a loss, or documents. They do not see each other.

Shapes: b samples of a microbatch, s tokens of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megalite.batch.microbatch import Microbatch
from megalite.data.epochs import Epochs
from megalite.data.gpt_dataset import Dataset, gather
from megalite.data.index_cache import IndexCache
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.loss_mask import LossMask
from megalite.data.packed_dataset import (
    NUM_FIELDS,
    PackedDataset,
    PackingOptions,
    sequences_row,
)
from megalite.kernels.visible_keys import document_starts
from megalite.utils.log import log


@dataclass(frozen=True)
class PackedSamples:
    """Samples of packed conversations or documents, or of one each.

    Attributes:
        marks_padding: every stage must know the padding, because its layers have experts.
    """

    options: PackingOptions
    marks_padding: bool = False

    are_masked = False  # --sft counts tokens while the batch runs
    are_of_documents = True
    are_whole_documents = True

    @property
    def on_every_stage(self) -> bool:
        """Return whether the layers must know the documents or the padding."""
        return self.options.packs or self.marks_padding

    @property
    def seq_length(self) -> int:
        return self.options.seq_length

    def check(self, corpus: IndexedDataset) -> None:
        if self.options.only_answers:
            LossMask(corpus).check(corpus.prefix)

    def num_tokens(self, corpus: IndexedDataset, sequences: range) -> int:
        """Return the positions of one epoch's samples."""
        lengths = corpus.sequence_lengths[sequences.start : sequences.stop]
        return self.options.num_samples(lengths) * self.seq_length

    def dataset(
        self,
        corpus: IndexedDataset,
        sequences: range,
        num_samples: int | None,
        split_name: str,
        cache: IndexCache | None,
    ) -> Epochs:
        packed = PackedDataset(corpus, sequences, self.options, split_name, cache)
        if num_samples is None:
            log.info("%s: %s", split_name, packed.use())
            return Epochs(packed, len(packed), self.options.seed)
        log.info("%s: %.3g epochs of %s", split_name, num_samples / len(packed), packed.use())
        return Epochs(packed, num_samples, self.options.seed)

    def mock(self, num_samples: int, split: int) -> MockSequences:
        return MockSequences(num_samples, split, self.options)

    def read(self, dataset: Dataset, numbers: npt.NDArray[np.int64]) -> Microbatch:
        return self.microbatch(torch.from_numpy(gather(dataset, numbers)), torch.from_numpy(numbers))

    def microbatch(self, rows: Tensor, sample_numbers: Tensor) -> Microbatch:
        """Return the microbatch of rows, int64 ``[b, 4 s]``; see `sequences_row`.

        Without packing, a sample is one document whose padding comes last, so that a causal model needs
        neither positions nor documents.
        """
        fields = rows.view(len(rows), NUM_FIELDS, -1).unbind(1)
        tokens, labels, kinds, documents = (field.contiguous() for field in fields)
        mask, is_real = kinds > 1, kinds > 0
        if not self.options.packs:
            return Microbatch(tokens, labels, sample_numbers, loss_mask=mask, is_real=is_real)
        positions = torch.arange(self.seq_length) - document_starts(documents)
        return Microbatch(tokens, labels, sample_numbers, positions, documents, mask, is_real)

    def marked(self, microbatch: Microbatch) -> Microbatch:
        return microbatch


class MockSequences:
    """Sequences of random tokens; a sample depends on the seed, the split and its number."""

    def __init__(self, num_samples: int, split: int, options: PackingOptions) -> None:
        self._num_samples = num_samples
        self._split = split
        self._options = options

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        options = self._options
        generator = np.random.default_rng((options.seed, self._split, index))
        left, sequences = options.seq_length, []
        while left > 0:
            length = min(left, int(generator.integers(1, options.seq_length // 2 + 2)))
            tokens = generator.integers(0, options.vocab_size, length + 1, dtype=np.int64)
            question = int(generator.integers(0, length))
            has_loss = np.arange(length + 1) > (question if options.only_answers else 0)
            sequences.append((tokens, has_loss))
            left -= length + int(generator.integers(0, 4))  # some samples end with padding
            if not options.packs:
                break
        return sequences_row(sequences, options.seq_length)
