"""Samples of consecutive tokens, cut from an indexed dataset."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from megalite.data.gpt_index import build_gpt_index
from megalite.data.indexed import IndexedDataset
from megalite.errors import UserError


class Dataset(Protocol):
    """Samples by number, each int64 [S + 1]: inputs are all but the last token, labels all but the first."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]: ...


class GPTDataset:
    """The samples of one split of one dataset.

    Attributes:
        index: the document, sample and shuffle index.

    Raises:
        UserError: the sequences hold fewer tokens than one sample.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        sequences: range,
        num_samples: int | None,
        seq_length: int,
        seed: int,
        vocab_size: int | None = None,
        split_name: str = "train",
    ) -> None:
        """Cuts the samples.

        Args:
            indexed: the dataset.
            sequences: the split's sequences.
            num_samples: at least so many; None for those of one epoch.
            seq_length: S; a sample holds S + 1 tokens.
            seed: of the order.
            vocab_size: if given, a sample with a token id beyond it is refused when it is read.
            split_name: for messages.
        """
        self._indexed = indexed
        self._seq_length = seq_length
        self._vocab_size = vocab_size
        lengths = indexed.sequence_lengths
        num_tokens = int(np.sum(lengths[sequences.start : sequences.stop], dtype=np.int64))
        if num_tokens < seq_length + 1:
            raise UserError(
                f"the {split_name} split of {indexed.prefix} holds {num_tokens} tokens in {len(sequences)} "
                f"sequences, fewer than the {seq_length + 1} of one sample: give it more text, a larger "
                "share in --split, or a smaller --seq-length"
            )
        self.index = build_gpt_index(lengths, sequences, num_samples, seq_length, seed)

    def __len__(self) -> int:
        return len(self.index.shuffle_index)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """The index-th sample in the shuffled order.

        Raises:
            UserError: a token id is outside the vocabulary.
            IndexError: there is no such sample.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a dataset of {len(self)}")
        row = int(self.index.shuffle_index[index])
        (first, begin), (last, end) = self.index.sample_index[row : row + 2].tolist()
        sample = np.empty(self._seq_length + 1, np.int64)
        filled = 0
        for position in range(first, last + 1):
            tokens = self._indexed[int(self.index.document_index[position])]
            tokens = tokens[begin if position == first else 0 : end + 1 if position == last else None]
            sample[filled : filled + len(tokens)] = tokens
            filled += len(tokens)
        if self._vocab_size is not None and not 0 <= sample.min() <= sample.max() < self._vocab_size:
            self._refuse_token(range(first, last + 1), self._vocab_size)
        return sample

    def _refuse_token(self, positions: range, vocab_size: int) -> None:
        """Names the token outside the vocabulary that one of these documents holds, and the document."""
        for sequence in self.index.document_index[positions.start : positions.stop].tolist():
            tokens = self._indexed[sequence]
            wrong = tokens[(tokens < 0) | (tokens >= vocab_size)]
            if len(wrong):
                raise UserError(
                    f"document {self._indexed.document_of(sequence)} of {self._indexed.prefix} has token id "
                    f"{wrong[0]}, outside the vocabulary of {vocab_size}: preprocess it with the tokenizer "
                    "of this model, or raise the vocabulary's size"
                )
        raise AssertionError("no token outside the vocabulary")
