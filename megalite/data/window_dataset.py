"""Cut GPT samples from a corpus as it lies, in the order of a keyed permutation that is computed, not stored.

Shapes: S tokens of a sample's input, b samples of a microbatch.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from megalite.data._index_builder import permute
from megalite.data.gpt_dataset import split_tokens
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.storage import FilesInUse

NUM_ROUNDS = 8
GROUP_BLOCKS = 256
"""Number of blocks whose windows are shuffled together."""

U64 = np.uint64


@lru_cache(maxsize=64)
def round_keys(*key: object) -> tuple[int, ...]:
    """Return the keys of the rounds of `permute`, below 2^64: the SHA-512 of the key's text."""
    digest = hashlib.sha512("/".join(map(str, key)).encode()).digest()
    return tuple(np.frombuffer(digest, "<u8", NUM_ROUNDS).tolist())


def mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return a hash of each number: MurmurHash3's 64-bit finalizer."""
    values = (values ^ values >> U64(33)) * U64(0xFF51AFD7ED558CCD)
    values = (values ^ values >> U64(33)) * U64(0xC4CEB9FE1A85EC53)
    return values ^ values >> U64(33)


def shuffled_windows(
    positions: npt.NDArray[np.int64], num_windows: int, shuffle_block: int, *key: object
) -> npt.NDArray[np.int64]:
    """Return the windows at these positions of an epoch.

    Blocks of `shuffle_block` windows are permuted, and then the windows of each `GROUP_BLOCKS` blocks. The
    windows that do not fill a block at the end of the corpus are in the last group. Blocks of one window are
    only permuted.

    Args:
        key: key of the epoch; that of a group also has the group's number.
    """
    if shuffle_block == 1:
        return permute(positions, num_windows, round_keys(*key))
    group_size = shuffle_block * GROUP_BLOCKS
    groups = positions // group_size
    positions = positions.copy()
    for group in set(groups.tolist()):
        rows, first = groups == group, group * group_size
        size = min(group_size, num_windows - first)
        positions[rows] = first + permute(positions[rows] - first, size, round_keys(*key, group))
    blocks, offsets = np.divmod(positions, shuffle_block)
    num_blocks = num_windows // shuffle_block
    full = blocks < num_blocks
    blocks[full] = permute(blocks[full], num_blocks, round_keys(*key))
    return blocks * shuffle_block + offsets


class WindowDataset:
    """Endless samples of one split of a corpus: in each epoch every window once, in another order.

    Window w holds the tokens [wS, wS + S] of the split. Up to S tokens at its end are in no window. The order
    depends on the seed, on the split's place and size in the corpus, on the size of a block, and on the
    epoch, but not on the length of the run: a longer run reads the same samples first.

    Of a corpus in object storage, the block of a sample is fetched as a whole.

    Args:
        num_samples: number of samples, from as many epochs as needed; None for one epoch.
        vocab_size: if set, reading a sample with a token id beyond it raises.
        shuffle_block: number of consecutive windows that are shuffled as one; see `shuffled_windows`.

    Attributes:
        num_windows: number of samples of an epoch.

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
        shuffle_block: int = 1,
    ) -> None:
        num_tokens = split_tokens(indexed, sequences, seq_length, split_name)
        self.indexed = indexed
        self.num_windows = (num_tokens - 1) // seq_length
        self._first_token = indexed.first_token(sequences.start)
        self._num_samples = self.num_windows if num_samples is None else num_samples
        self._seq_length = seq_length
        self._vocab_size = vocab_size
        self._shuffle_block = shuffle_block
        self._fetches_blocks = shuffle_block > 1 and indexed.is_remote
        self._key = (seed, self._first_token, num_tokens, len(sequences))
        self._tokens = indexed.token_source(reads_index=False)
        self._files = FilesInUse(indexed.files)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Return the index-th sample; see `gather`."""
        return self.gather(np.array([index], np.int64))[0]

    def windows(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the windows of the samples with these numbers, int64 [b].

        Raises:
            IndexError: there is no such sample.
        """
        if len(outside := samples[(samples < 0) | (samples >= len(self))]):
            raise IndexError(f"sample {outside[0]} of a dataset of {len(self)}")
        epochs, positions = np.divmod(samples, self.num_windows)
        result = np.empty_like(positions)
        for epoch in set(epochs.tolist()):
            rows = epochs == epoch
            key = *self._key, epoch
            result[rows] = shuffled_windows(positions[rows], self.num_windows, self._shuffle_block, *key)
        return result

    def gather(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the samples with these numbers, int64 [b, S + 1].

        Raises:
            UserError: a token id is outside the vocabulary, or a file was changed since it was opened.
            IndexError: there is no such sample.
        """
        windows = self.windows(samples)
        if self._fetches_blocks:
            firsts = np.unique(windows // self._shuffle_block) * self._shuffle_block
            nexts = self._begins(np.minimum(firsts + self._shuffle_block, self.num_windows))
            self.indexed.fetch([(at, end + 1) for at, end in zip(self._begins(firsts), nexts, strict=True)])
        begins = self._begins(windows)
        text = np.empty((len(begins), self._seq_length + 1), np.int64)
        if self._tokens is not None:
            smallest, largest = self._tokens.gather_spans(np.array(begins, np.int64), text)
        else:
            text[:] = self.indexed.read_spans([(at, at + self._seq_length + 1) for at in begins])
            smallest, largest = int(text.min()), int(text.max())
        self._files.check()
        if self._vocab_size is not None and (smallest < 0 or largest >= self._vocab_size):
            for begin in begins:
                for sequence, _, tokens in self._spans_from(begin):
                    self.indexed.check_vocabulary(sequence, tokens, self._vocab_size)
        return text

    def _begins(self, windows: npt.NDArray[np.int64]) -> list[int]:
        begins: list[int] = (self._first_token + windows * self._seq_length).tolist()
        return begins

    def spans(self, index: int) -> list[tuple[int, int, npt.NDArray[Any]]]:
        """Return the sequences that a sample reads, each with its first token's position and the tokens."""
        (begin,) = self._begins(self.windows(np.array([index], np.int64)))
        return self._spans_from(begin)

    def _spans_from(self, begin: int) -> list[tuple[int, int, npt.NDArray[Any]]]:
        end, itemsize = begin + self._seq_length + 1, self.indexed.dtype.itemsize
        offsets = self.indexed.sequence_offsets
        first = bisect_right(offsets, begin * itemsize) - 1  # skips empty sequences
        last = bisect_left(offsets, end * itemsize)
        spans = []
        for sequence in range(first, last):
            start = int(offsets[sequence]) // itemsize
            stop = min(end, start + int(self.indexed.sequence_lengths[sequence]))
            if (at := max(begin, start)) < stop:
                spans.append((sequence, at - start, self.indexed.read_tokens(at, stop)))
        return spans

    def verify_files(self) -> None:
        self._files.verify()
