"""Samples of consecutive tokens, cut from an indexed dataset."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from megalite.data import _index_builder
from megalite.data.gpt_index import build_gpt_index, cached_gpt_index
from megalite.data.index_cache import IndexCache
from megalite.data.indexed import IndexedDataset
from megalite.data.storage import FilesInUse
from megalite.errors import UserError


class Dataset(Protocol):
    """Samples by number, each int64 [S + 1]: inputs are all but the last token, labels all but the first."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]: ...


@runtime_checkable
class GatherDataset(Protocol):
    """A dataset that reads many samples in one go, faster than one by one."""

    def gather(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The samples of these numbers, int64 [b, S + 1]."""
        ...


def gather(dataset: Dataset, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Samples of any dataset by their numbers, int64 [b, S + 1]."""
    if isinstance(dataset, GatherDataset):
        return dataset.gather(samples)
    return np.stack([dataset[i] for i in samples.tolist()])


class GPTDataset:
    """The samples of one split of one dataset.

    Attributes:
        indexed: the corpus.
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
        cache: IndexCache | None = None,
    ) -> None:
        """Cuts the samples.

        Args:
            indexed: the dataset.
            sequences: the split's sequences.
            num_samples: at least so many; None for those of one epoch.
            seq_length: S; a sample holds S + 1 tokens.
            seed: of the order.
            vocab_size: if given, a sample with a token id beyond it is refused when it is read.
            split_name: for messages, and the names of files in the cache.
            cache: if given, where the index is mapped from and kept.
        """
        self.indexed = indexed
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
        asked = (lengths, sequences, num_samples, seq_length, seed)
        if cache is None:
            self.index = build_gpt_index(*asked, f"the order of the {split_name} split of {indexed.prefix}")
        else:
            self.index = cached_gpt_index(cache, indexed.prefix, split_name, *asked)
        self._files = FilesInUse((*indexed.files, *self.index.files))

    def __len__(self) -> int:
        return len(self.index.shuffle_index)

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """The index-th sample in the shuffled order.

        Raises:
            UserError: a token id is outside the vocabulary.
            IndexError: there is no such sample.
        """
        return self.gather(np.array([index], np.int64))[0]

    def gather(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The samples of these numbers in the shuffled order, int64 [b, S + 1], read without the GIL.

        Raises:
            UserError: a token id is outside the vocabulary, a file of the corpus or of the index became
                shorter, or the index that the cache keeps was changed since it was opened.
            IndexError: there is no such sample.
        """
        for sample in samples.tolist():
            if not 0 <= sample < len(self):
                raise IndexError(f"sample {sample} of a dataset of {len(self)}")
        rows = self.index.shuffle_index[samples].astype(np.int64)
        if self.indexed.is_remote:
            text = np.stack([self._read_in_sequences(row) for row in rows.tolist()])
            smallest, largest = int(text.min()), int(text.max())
        else:
            text, smallest, largest = self._read_mapped(rows)
        self._files.check()
        if self._vocab_size is not None and (smallest < 0 or largest >= self._vocab_size):
            self._refuse_token(rows, self._vocab_size)
        return text

    def _read_mapped(self, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], int, int]:
        """The samples of these rows, and their smallest and largest token."""
        text = np.empty((len(rows), self._seq_length + 1), np.int64)
        try:
            smallest, largest = _index_builder.gather_samples(
                self.indexed.tokens,
                self.indexed.sequence_offsets,
                self.indexed.sequence_lengths,
                self.index.document_index,
                self.index.sample_index.reshape(-1),
                rows,
                text,
            )
        except IndexError as error:  # corpus and index were checked on opening
            self._files.check()
            raise UserError(
                f"the index of {self.indexed.prefix} that is kept in --data-cache-path, by default "
                f"{self.indexed.prefix}/cache, is damaged ({error}): delete it, to have it built again"
            ) from None
        return text, smallest, largest

    def _read_in_sequences(self, row: int) -> npt.NDArray[np.int64]:
        """One sample, of no more than the sequences that it lies in: what else there is may be far away."""
        (first, begin), (last, end) = self.index.sample_index[row : row + 2].tolist()
        parts = [self.indexed[i] for i in self.index.document_index[first : last + 1].tolist()]
        parts[-1] = parts[-1][: end + 1]
        parts[0] = parts[0][begin:]
        return np.concatenate(parts).astype(np.int64)

    def _refuse_token(self, rows: npt.NDArray[np.int64], vocab_size: int) -> None:
        """Names the token outside the vocabulary that a document of these samples holds, and the document."""
        for row in rows.tolist():
            first, last = self.index.sample_index[row : row + 2, 0].tolist()
            for sequence in self.index.document_index[first : last + 1].tolist():
                tokens = self.indexed[sequence]
                wrong = tokens[(tokens < 0) | (tokens >= vocab_size)]
                if len(wrong):
                    raise UserError(
                        f"document {self.indexed.document_of(sequence)} of {self.indexed.prefix} has token "
                        f"id {wrong[0]}, outside the vocabulary of {vocab_size}: preprocess it with the "
                        "tokenizer of this model, or raise the vocabulary's size"
                    )
        raise AssertionError("no token outside the vocabulary")
