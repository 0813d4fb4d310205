"""Read the loss mask of a corpus of conversations: a byte per token in PREFIX.loss_mask, 1 in answers."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.storage import MappedBytes, is_remote, open_bytes
from megalite.utils.errors import UserError

LOSS_MASK = "loss_mask"
"""Suffix of the file."""
NUM_CHECKED = 16
"""Number of a corpus's conversations to check for answers."""


def has_loss_mask(prefix: str) -> bool:
    """Return whether a corpus on this machine has a loss mask; False for one in object storage."""
    return not is_remote(prefix) and os.path.exists(loss_mask_path(prefix))


def loss_mask_path(prefix: str) -> str:
    """Return the path of the file that holds the loss mask of a corpus."""
    return f"{prefix.removeprefix('file://')}.{LOSS_MASK}"


class LossMask:
    """Memory-mapped loss mask of a corpus.

    Attributes:
        file: the mapped file.

    Raises:
        UserError: the corpus has no loss mask, or the mask of another corpus.
    """

    def __init__(self, corpus: IndexedDataset) -> None:
        path = loss_mask_path(corpus.prefix)
        try:
            self.file: MappedBytes = open_bytes(path)
        except FileNotFoundError:
            raise UserError(
                f"{corpus.prefix} has no answers marked, there is no {path}: preprocess conversations with "
                "--chat, or train without --sft"
            ) from None
        if len(self.file.array) != corpus.num_tokens:
            raise UserError(
                f"{path} has {len(self.file.array)} bytes, and {corpus.prefix}.bin {corpus.num_tokens} "
                "tokens: one belongs to another dataset; preprocess it again"
            )
        self._starts = corpus.sequence_offsets
        self._lengths = corpus.sequence_lengths
        self._item_size = corpus.dtype.itemsize

    def __getitem__(self, sequence: int) -> npt.NDArray[np.bool_]:
        """Return which tokens of a sequence belong to answers."""
        begin = int(self._starts[sequence]) // self._item_size
        end = begin + int(self._lengths[sequence])
        self.file.fetch(begin, end)
        return self.file.array[begin:end] != 0

    def check(self, prefix: str) -> None:
        """Refuse a mask that marks nothing in the first conversations.

        Raises:
            UserError: none of their tokens belongs to an answer.
        """
        first = range(min(NUM_CHECKED, len(self._lengths)))
        if first and not any(self[i].any() for i in first):
            raise UserError(
                f"{prefix}.{LOSS_MASK} marks no token of the first {len(first)} conversations as an answer, "
                "so nothing would be learned: preprocess the conversations again with --chat"
            )
